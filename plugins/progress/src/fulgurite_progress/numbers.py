"""Write large numbers with the prefixes of units."""


def format_bytes(count: float) -> str:
    """Return a number of bytes, such as `1.2 MB`."""
    return f"{format_count(count)}B"


def format_count(number: float) -> str:
    """Return a number in three digits, with a space behind it, and a prefix of 1,000s if any."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:  # what is more has four digits when it is rounded
            return f"{number:.0f} {unit}" if not unit or number >= 100 else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} P"
