"""Gradient synchronization of a model: which reductions run in which backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fusedops.parallel.data import fsdp
from fusedops.parallel.data.ddp import BucketedAllReduce


@dataclass
class GradientSync:
    """What sums the gradients of a model over data-parallel ranks, and when."""

    reducers: list[BucketedAllReduce] = field(default_factory=list)  # of the replicated parameters
    # Modules that ``shard`` sharded, the one that contains all others last
    sharded: list[nn.Module] = field(default_factory=list)
    stage: int = 0  # of ``shard``; 0 if nothing is sharded

    def begin(self, *, last: bool) -> None:
        """Prepare for the forward and backward of a micro-batch; ``last``: of a step.

        Before the last one, only stages 2 and 3 reduce gradients, because they keep them sharded.
        Stages 1 and 2 keep weights unsharded until the backward of the last one.
        """
        self.recover()
        for reducer in self.reducers:
            reducer.begin(last=last)
        self._set(last, sync=last or self.stage > 1, reshard=last or self.stage == 3)

    def recover(self) -> None:
        """Discard what a step that raised on all ranks has left; ``zero_grad`` follows."""
        for reducer in self.reducers:
            reducer.recover()
        for root in self.sharded[-1:]:
            fsdp.recover(root)

    def release_weights(self) -> None:
        """Free the weights that a forward without a backward has left gathered."""
        for root in self.sharded[-1:]:
            fsdp.release_weights(root)

    def begin_part(self) -> None:
        """Prepare for a part of a backward that comes in two, both of which read all weights.

        FSDP2's hooks do nothing: they run with gradients of inputs, those of weights come later.
        """
        self._set(False, sync=False, reshard=False)
        for root in self.sharded[-1:]:
            fsdp.gather_weights(root)

    def end_part(self, *, weights: bool, last: bool) -> None:
        """Do what FSDP2's hooks do in an undivided backward; ``weights``: their gradients exist."""
        if weights:
            self.begin(last=last)
        for root in self.sharded[-1:]:
            if weights:
                fsdp.finish_backward(root)
            elif self.stage == 3:
                fsdp.release_weights(root)

    def _set(self, last: bool, *, sync: bool, reshard: bool) -> None:
        for module in self.sharded:
            module.set_is_last_backward(last)  # type: ignore[operator]
            module.set_requires_gradient_sync(sync)  # type: ignore[operator]
            module.set_reshard_after_backward(reshard)  # type: ignore[operator]

    def start(self) -> None:
        """Start to reduce the gradients of replicated parameters, all of which are ready."""
        for reducer in self.reducers:
            reducer.start()

    def finish(self) -> None:
        """Wait for the reductions of ``start``."""
        for reducer in self.reducers:
            reducer.finish()
