"""Tables of measured settings."""

import re

from gcnzc.tune.profiles import TuningProfile


def lines(found: TuningProfile) -> list[str]:
    """A plan, as lines for a person: each setting, its reason, and the figures behind it."""
    device = found.key["device"]
    about = found.key["table"]
    told = [
        f"plan for {device['name']} and rows of {about['row_bytes']} B {about['dtype']}, "
        f"{about['pitch_bytes']} B apart; made with {found.data}, {found.made}"
    ]
    shown = {name: _shown(name, choice.value) for name, choice in found.choices.items()}
    wide, wider = (max(map(len, words)) for words in (shown, shown.values()))
    for name, choice in found.choices.items():
        basis = "as usual" if choice.basis == "default" else choice.basis
        value = shown[name]
        told.append(f"{name.ljust(wide)}  {value.rjust(wider)}  {basis}: {choice.why}")
        if name == "vectors":
            # those of warps
            continue
        for kind, values in choice.figures.items():
            if isinstance(values, dict) and values:
                cells = [
                    f"{_shown(name, float(at)) if name == 'hot' else at}: "
                    f"{figure_text(kind, figure)}"
                    for at, figure in values.items()
                ]
                what = re.sub("_(s|bytes)$", "", kind).replace("_", " ")
                told.append(f"{' ' * (wide + wider + 4)}{what}: {', '.join(cells)}")
    return told


def figure_text(kind: str, value: float) -> str:
    """Format a measured value with the unit that its name implies."""
    if kind.endswith("_s"):
        return f"{value * 1e3:.3g} ms"
    if kind.endswith("rate"):
        return f"{value:.1%}"
    return f"{value / 1e6:.1f} MB" if kind.endswith("bytes") else f"{value:.4g}"


def _shown(name: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name == "hot" else f"{value:.2f}"
    return str(value)
