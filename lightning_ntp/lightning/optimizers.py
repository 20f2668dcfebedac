"""Which optimizers can be trained with: one closure call per step, and on shards every element by itself.

The others are refused by name, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule
from torch.optim import LBFGS, Optimizer

from lightning_ntp.lightning.checkpoint import never_cut
from lightning_ntp.parallel import ShardedModel

_NEEDS_WHOLE_PARAMETERS = {
    "muon": "orthogonalises whole matrices",
    "adafactor": "keeps means over whole rows and columns",
    "lamb": "scales updates by the norm of the whole parameter",
    "lars": "scales updates by the norm of the whole parameter",
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
}
"""Lower-case class names, of torch and elsewhere. On shards these would give other numbers, mostly without an error."""


def check_optimizers(optimizers: Iterable[Optimizer], model: ShardedModel, module: LightningModule) -> None:
    """Check that optimizers hold the module's own parameters and may be given shards of them.

    Raises:
        ValueError: If an optimizer holds a foreign parameter.
        TypeError: If an optimizer calls its closure several times, or would compute something else from a shard than
            from the whole parameter.
    """
    known = model.by_parameter()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise ValueError(
                        f"{name} holds a parameter of shape {tuple(parameter.shape)} that is not the"
                        f" {type(module).__name__}'s own: build optimizers from self.parameters()"
                    )
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                f"{name} runs forward and backward several times in one step and changes parameters in between, so its"
                " steps cannot be repeated after a loss: use an optimizer such as SGD, Adam or AdamW"
            )
        if never_cut(model):
            continue
        for base in type(optimizer).__mro__:
            reason = _NEEDS_WHOLE_PARAMETERS.get(base.__name__.lower())
            if reason is not None:
                raise TypeError(
                    f"{name} {reason}, so on a shard it would compute something else: use an optimizer that treats"
                    " every element by itself, such as SGD, Adam, AdamW, Adagrad or RMSprop"
                )
