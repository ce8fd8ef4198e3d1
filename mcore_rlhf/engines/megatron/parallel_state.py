"""Where this rank stands among Megatron's process groups, and which rank folder is its own.

Sources: megatron-core 0.16.1, ``parallel_state.py``; Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py``
(``save_checkpoint``: ranks with expert-data-parallel rank 0 write the model file).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.megatron.folders import FileRank, file_ranks, folder_name
from mcore_rlhf.layouts.parallel import Coordinates, ParallelConfig


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """One rank of a run.

    Args:
        rank: Its global rank.
        parallel: The degrees.
        at: Its coordinates.
    """

    rank: int
    parallel: ParallelConfig
    at: Coordinates

    @property
    def folder(self) -> str:
        """The name of the folder with this rank's model file."""
        return self.folder_of(self.rank)

    @property
    def file_rank(self) -> FileRank:
        """This rank as one whose coordinates name files."""
        dense = self.at.dp_rank == 0 and self.at.cp_rank == 0
        at = self.at
        return FileRank(
            self.folder, at.tp_rank, at.pp_rank, at.ep_rank, at.etp_rank, self.rank, dense, at.expert_dp_rank == 0
        )

    @property
    def writes_model(self) -> bool:
        """Whether this rank writes its folder's model file."""
        return any(writer.rank == self.rank for writer in file_ranks(self.parallel))

    @property
    def trains_experts_twice(self) -> bool:
        """Whether a layer-wise optimizer has every expert on all ranks that share it, and steps with the gradients of their own shards.

        Its masters are then not those of the parameters, which the ranks gather from one another. Source: megatron-core 0.19.2,
        ``optimizer/layer_wise_optimizer.py`` (``shard_params``: it deals nothing where one rank has the dense parameters).
        """
        return self.parallel.dp * self.parallel.cp == 1 and self.parallel.expert_dp > 1

    @property
    def layer_wise_file(self) -> str:
        """The file of a layer-wise optimizer's states that this rank has. Megatron's name has no context coordinate."""
        return self.layer_wise_file_of(self.rank)

    def layer_wise_file_of(self, rank: int) -> str:
        """That of another rank."""
        at = self.parallel.coordinates(rank)
        return f"layer_wise_optimizer_{at.dp_rank}{f'_cp{at.cp_rank}' if self.parallel.cp > 1 else ''}.pt"

    def folder_of(self, rank: int) -> str:
        """The name of another rank's folder."""
        at = self.parallel.coordinates(rank)
        return folder_name(at.tp_rank, at.pp_rank, at.ep_rank, self.parallel)

    def contributors(self, first: int, expert: bool, count: int) -> set[int]:
        """The data-parallel ranks that share a member's state, told without asking them.

        Args:
            first: Whose file they write to.
            expert: Whether they share out experts or dense parameters.
            count: How many they are: all, or those of one instance of the distributed optimizer.

        Returns:
            Their ranks; none where another rank is the first of them, and so they write to its file.
        """
        parallel, here = self.parallel, self.parallel.coordinates(first)
        stage = range(here.pp_rank * parallel.stage_size, (here.pp_rank + 1) * parallel.stage_size)
        at = {rank: parallel.coordinates(rank) for rank in stage}
        if expert:
            alike = [r for r, c in at.items() if (c.ep_rank, c.etp_rank) == (here.ep_rank, here.etp_rank)]
        else:
            alike = [r for r, c in at.items() if c.tp_rank == here.tp_rank]
        return set(alike[:count]) if alike[0] == first else set()

    def check(self) -> None:
        """Whether every shard of this layout has a file, and every file one writer.

        Raises:
            Unsupported: Megatron's torch format cannot hold the layout, or ranks are numbered in another order.
        """
        expected = self.parallel.coordinates(self.rank)
        if self.at != expected:
            raise Unsupported(
                f"rank {self.rank}: Megatron's groups put it at {self.at}, expected {expected} for {self.parallel}\n"
                "Only Megatron's default order of ranks is supported (tp-cp-ep-dp-pp); leave out --use-tp-pp-dp-mapping."
            )
        file_ranks(self.parallel)


def current_rank(vpp: int, moe: bool) -> ParallelRank:
    """The calling rank's place.

    Args:
        vpp: Model chunks of this rank.
        moe: Whether the model has routed experts; without, Megatron's expert groups say nothing.
    """
    state = parallel_state
    tp, cp = state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size()
    parallel = ParallelConfig(
        tp=tp, pp=state.get_pipeline_model_parallel_world_size(), vpp=vpp, cp=cp,
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size() if moe else tp,
        dp=state.get_data_parallel_world_size(),
    )  # fmt: skip
    tp_rank, dp_rank = state.get_tensor_model_parallel_rank(), state.get_data_parallel_rank()
    cp_rank, pp_rank = state.get_context_parallel_rank(), state.get_pipeline_model_parallel_rank()
    if moe or parallel.ep > 1:
        ep_rank, etp_rank = state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()
        expert_dp_rank = state.get_expert_data_parallel_rank()
    else:
        ep_rank, etp_rank, expert_dp_rank = 0, tp_rank, dp_rank * cp + cp_rank
    at = Coordinates(tp_rank, pp_rank, cp_rank, dp_rank, ep_rank, etp_rank, expert_dp_rank)
    return ParallelRank(dist.get_rank(), parallel, at)
