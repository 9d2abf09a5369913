"""What an engine refuses, whoever derives from it."""

from collections.abc import Mapping
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fulgurite._src.foreign_names import check_foreign_arguments
from fulgurite._src.tracebacks import hide_internal_frames
from fulgurite.errors import ConfigurationError


class GuardedEngine:
    """The base of the engine: subclasses and programs can neither overwrite by accident what its
    constructor sets, nor hide its methods, nor copy it."""

    _set_once: ClassVar[frozenset[str]] = frozenset()
    """The attributes that the constructor alone sets."""
    _set_by_programs: ClassVar[frozenset[str]] = frozenset()
    """Those that the constructor sets, and programs may set again."""
    _foreign_arguments: ClassVar[Mapping[str, str]] = {}
    """What to give instead of arguments of other libraries, by their names."""
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hidden = sorted(vars(cls).keys() & (cls._set_once | cls._set_by_programs))
        if hidden:
            raise ConfigurationError(
                f"{cls.__name__}.{hidden[0]} is hidden: the engine's constructor sets an attribute "
                "of this name. Give yours another name; a setting is an argument of the constructor"
            )
        # Help, editors and configurations are to see the arguments of `__init__`: Python takes
        # those of `__new__` otherwise, which takes any.
        whole = signature(cls.__init__)
        parameters = list(whole.parameters.values())[1:]
        cls.__signature__ = whole.replace(parameters=parameters, return_annotation=cls)

    @hide_internal_frames
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse arguments by their names in other libraries, with ours."""
        known = signature(cls.__init__).parameters
        check_foreign_arguments(cls.__name__, kwargs, known, cls._foreign_arguments)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # type checkers would take it as leave to set any attribute

        @hide_internal_frames
        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse to overwrite what the engine needs."""
            self._check_assignment(name, value)
            super().__setattr__(name, value)

    def _check_assignment(self, name: str, value: Any) -> None:
        """Raise a `ConfigurationError` if an attribute that is set once is set again, or if what is
        set hides a method.

        Args:
            name: of the attribute.
            value: its new value.
        """
        cls = type(self)
        if name in cls._set_once and name in vars(self):
            raise ConfigurationError(
                f"{cls.__name__}: the attribute {name!r} is the engine's own, which its "
                f"constructor alone sets. Give yours another name, such as 'my_{name}'; a setting "
                "is an argument of the constructor"
            )
        is_method = callable(getattr(cls, name, None))
        if is_method and not callable(value):
            raise ConfigurationError(
                f"{cls.__name__}: the attribute {name!r} would hide the method {name}(). Give it "
                f"another name, such as 'my_{name}'"
            )

    def __reduce__(self) -> Any:
        """Refuse to be pickled: executables and open files stay in their process."""
        raise TypeError(
            "an Engine cannot be pickled or copied: hand over a function or a configuration that "
            "makes it, and call that in the other process"
        )
