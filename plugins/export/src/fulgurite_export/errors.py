"""What is raised where an exported folder is loaded and called.

It derives from no class of `fulgurite.errors`, because Fulgurite need not be installed there.
"""


class ExportError(Exception):
    """A folder that is not what `export` wrote, or that cannot be used in this process.

    Example:
        from fulgurite_export import ExportError, load

        try:
            load("nowhere")
        except ExportError as error:
            print(error)
    """


class InputError(ExportError, ValueError):
    """An input that an exported function does not take; the message says what it expects."""
