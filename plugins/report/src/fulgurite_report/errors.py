"""What this package raises on purpose."""


class ReportError(Exception):
    """A run or a file that cannot be shown.

    Example:
        from fulgurite_report import ReportError, find_runs

        try:
            find_runs(["runs/nowhere"])
        except ReportError as error:
            print(error)
    """
