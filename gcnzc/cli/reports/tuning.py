"""Format tuning profiles as text."""

import re

from gcnzc.tune.profiles import TuningProfile


def format_profile(found: TuningProfile) -> list[str]:
    """Format a tuning profile: each setting, the reason for it, and the measurements behind it."""
    device = found.key["device"]
    table = found.key["table"]
    lines = [
        f"tuning profile for {device['name']} and rows of {table['row_bytes']} B {table['dtype']}, "
        f"with a pitch of {table['pitch_bytes']} B; measured with {found.data}, {found.made}"
    ]
    values = {name: _format_setting(name, choice.value) for name, choice in found.choices.items()}
    name_width, value_width = (max(map(len, texts)) for texts in (values, values.values()))
    for name, choice in found.choices.items():
        value = values[name].rjust(value_width)
        lines.append(f"{name.ljust(name_width)}  {value}  {choice.basis}: {choice.why}")
        if name == "vectors":
            # the measurements are those of `warps`
            continue
        for kind, figures in choice.figures.items():
            if isinstance(figures, dict) and figures:
                cells = [
                    f"{_format_setting(name, float(tried)) if name == 'hot' else tried}: "
                    f"{format_figure(kind, figure)}"
                    for tried, figure in figures.items()
                ]
                title = re.sub("_(s|bytes)$", "", kind).replace("_", " ")
                indent = " " * (name_width + value_width + 4)
                lines.append(f"{indent}{title}: {', '.join(cells)}")
    return lines


def format_figure(kind: str, value: float) -> str:
    """Format a measured value with the unit that its name implies."""
    if kind.endswith("_s"):
        return f"{value * 1e3:.3g} ms"
    if kind.endswith("rate"):
        return f"{value:.1%}"
    return f"{value / 1e6:.1f} MB" if kind.endswith("bytes") else f"{value:.4g}"


def _format_setting(name: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name == "hot" else f"{value:.2f}"
    return str(value)
