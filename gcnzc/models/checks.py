"""Checks of the arguments of models."""

from gcnzc.system.arguments import check_number


def check_compatible(
    *,
    norm: str,
    pre_norm: bool,
    pre_activation: bool,
    input_linear: bool,
    output_linear: bool,
    jumping: str,
) -> None:
    """Raise a ValueError if an option has no effect or is not possible with the others."""
    if pre_norm and norm == "none":
        raise ValueError(
            "pre_norm has no effect with norm none\n\nhint: also pass norm='batch' or norm='layer'"
        )
    if pre_norm and pre_activation:
        raise ValueError(
            "pre_activation includes pre_norm\n\nhint: pass one of them; norm chooses the "
            "normalization"
        )
    if pre_activation and not (input_linear and output_linear):
        raise ValueError(
            "pre_activation needs input_linear and output_linear: activation comes before each "
            "layer, and would change the features\n\n"
            "hint: also pass input_linear=True and output_linear=True"
        )
    if jumping != "none" and not output_linear:
        raise ValueError(
            f"jumping {jumping} needs output_linear: the outputs of hidden layers do not have as "
            "many columns as the logits\n\nhint: also pass output_linear=True"
        )


def check_probability(name: str, p: float) -> float:
    """Return a dropout probability, which must be in [0, 1)."""
    return check_number(name, p, lambda value: 0 <= value < 1, "use a probability in [0, 1)")
