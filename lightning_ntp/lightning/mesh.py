"""What a module can read of its place, in ``configure_model`` and later, by the names of a device mesh."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist

from lightning_ntp.comm import Runtime


class MeshDimension:
    """One dimension of the mesh, with the reading methods of :class:`torch.distributed.device_mesh.DeviceMesh`."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self._name = runtime, name

    def size(self) -> int:
        """Tensor parallel: the live degree of this rank's replica. Data parallel: the number of live replicas."""
        generation = self._runtime.generation
        if self._name == "tensor_parallel":
            return generation.degree
        return len(generation.topology.live_replicas)

    def get_local_rank(self) -> int:
        """Tensor parallel: the position in the replica. Data parallel: the position among live replicas."""
        generation = self._runtime.generation
        if self._name == "tensor_parallel":
            return generation.topology.family.indices(generation.degree).index(generation.index)
        return generation.topology.live_replicas.index(generation.replica)

    def get_group(self) -> dist.ProcessGroup | None:
        """The process group of the current generation; None if this rank is alone in it.

        Ask each time: groups change with the membership.
        """
        generation = self._runtime.generation
        if self._name == "tensor_parallel":
            return generation.tensor_parallel
        return generation.sync_data_parallel


class Mesh:
    """A live view of replicas x tensor-parallel indices.

    A :class:`~torch.distributed.device_mesh.DeviceMesh` is rectangular and fixed; replicas here may differ in
    degree and change it. ``mesh["tensor_parallel"]`` and ``mesh["data_parallel"]`` answer for the present.
    """

    mesh_dim_names = ("data_parallel", "tensor_parallel")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getitem__(self, name: Literal["data_parallel", "tensor_parallel"]) -> MeshDimension:
        if name not in self.mesh_dim_names:
            raise KeyError(f"the mesh has the dimensions {self.mesh_dim_names}, not {name!r}")
        return MeshDimension(self._runtime, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # a copied module (weight averaging, pruning) lives in the same replica

    def __repr__(self) -> str:
        return f"Mesh(degrees={self._runtime.generation.topology.degrees})"
