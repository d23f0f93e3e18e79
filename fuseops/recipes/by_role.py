"""The recipes that differ between ops: by a function of op, name and role, or by globs over names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.globs import as_globs, matches

from .recipe import BACKWARDS, POLICIES, Recipe, Roles, option
from .scales import ROLES
from .scaling import Scaling

Choose = Callable[[Any, str, str], Scaling | None]


@dataclass(frozen=True)
class ByRole(Recipe):
    """A `ByRole` takes the format of each operand from `choose(op, name, role)`; None is high precision.

    role: "input", "weight" or "grad_output".  name: the dotted name of the op in the model that is configured,
    `fo.configure(model, recipe=ByRole(choose))`; otherwise in the Sequential that runs.
    `choose` is called when a call is planned, and must be a pure function: for other formats pass another one.
    weights, backward: as in `Float8BlockScaling`.
    Raises FuseOpsError, when a call is planned, if `choose` returns neither a Scaling nor None.
    """

    choose: Choose
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.choose):
            raise FuseOpsError(
                f"ByRole: choose is {shown(self.choose)}, expected a function of (op, name, role)."
            )

    def roles_of(self, op: Any, name: str) -> Roles:
        x, weight, dy = (self._scaling(op, name, role) for role in ROLES)
        return Roles(x, weight, dy, weights=self.weights, backward=self.backward)

    def _scaling(self, op: Any, name: str, role: str) -> Scaling | None:
        given = self.choose(op, name, role)
        if given is None or isinstance(given, Scaling):
            return given
        raise FuseOpsError(
            f"ByRole: {name!r} ({type(op).__name__}), {role}: the function gave {shown(given)}, expected a "
            "fuseops.recipes.Scaling, or None for high precision."
        )


@dataclass(frozen=True)
class ByName(Recipe):
    """A `ByName` gives an op the recipe of the first glob that matches its name; None, or no match, is high precision.

    `fo.configure(model, recipe={"head.**": None, "**": MXFP8BlockScaling()})` makes one, since names start at a model.
    """

    choices: tuple[tuple[str, Recipe | None], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.choices, tuple):
            raise FuseOpsError(
                f"ByName(choices={shown(self.choices)}): expected ((glob, recipe), ...). fo.configure(model, "
                "recipe={glob: recipe}) makes it of a dict, and looks whether each glob names an op."
            )
        super().__post_init__()

    @classmethod
    def of(cls, given: Mapping[Any, Any], names: list[str]) -> ByName:
        """The recipe of a {glob: recipe} mapping for a model whose ops have these names.

        Raises FuseOpsError for a key that is no glob, a value that is no recipe, and a glob that matches no name.
        """
        for glob, recipe in given.items():
            as_globs(glob, "configure(model, recipe={...})")
            if not isinstance(recipe, Recipe | None):
                raise FuseOpsError(
                    f"recipe[{glob!r}] must be a fuseops.recipes.Recipe or None, got {shown(recipe)}."
                )
            if not any(matches(glob, name) for name in names):
                raise FuseOpsError(
                    f"recipe[{glob!r}] matches no op that multiplies; those of the model are {names}."
                )
        return cls(tuple(given.items()))

    def roles_of(self, op: Any, name: str) -> Roles:
        found = next((recipe for glob, recipe in self.choices if matches(glob, name)), None)
        return Roles() if found is None else found.roles_of(op, name)
