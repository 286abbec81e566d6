"""Peaks, memory and links of the devices that a run may be on or planned for.

FLOP/s are dense, without sparsity; bandwidths are bytes per second in one
direction, where data sheets often add up both.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One GPU inside a node of several, as a training cluster has them.

  The last two are no data sheet's but assumptions: what a well-tuned step
  reaches of the peaks. Large language models are reported at 40% to 55% of the
  bfloat16 peak (Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_,
  2022, table 3), and large transfers at about four fifths of a link.

  Attributes:
    kinds: names by `jax.Device.device_kind`.
    bfloat16_flops: of matrix products with bfloat16 factors.
    tensorfloat32_flops: of float32 products at jax's default precision.
    float32_flops: of float32 products at the highest precision.
    memory_bytes: of the device.
    memory_bandwidth: of that memory.
    link_bandwidth: to the other GPUs of the node.
    network_bandwidth: from a GPU out of its node.
    gpus_per_node: how many share the links.
    achievable_flops: share of the FLOP/s that products reach.
    achievable_bandwidth: share of the bandwidths that transfers reach.
  """

  kinds: tuple[str, ...]
  bfloat16_flops: float
  tensorfloat32_flops: float
  float32_flops: float
  memory_bytes: float
  memory_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float
  gpus_per_node: int
  achievable_flops: float
  achievable_bandwidth: float


GPUS = {
  # NVIDIA A100 80GB SXM data sheet: 312, 156 and 19.5 TFLOP/s, 80 GB at 2,039
  # GB/s, NVLink 600 GB/s both ways. DGX A100 data sheet: 8 GPUs, and 8 compute
  # adapters (ConnectX-6) of 200 Gb/s.
  'a100': Gpu(
    kinds=('NVIDIA A100-SXM4-80GB',),
    bfloat16_flops=312e12,
    tensorfloat32_flops=156e12,
    float32_flops=19.5e12,
    memory_bytes=80e9,
    memory_bandwidth=2.039e12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    gpus_per_node=8,
    achievable_flops=0.5,
    achievable_bandwidth=0.8,
  ),
  # NVIDIA H100 SXM data sheet: 1,979 and 989 TFLOP/s with sparsity, which is
  # twice the dense peak, and 67 TFLOP/s; 80 GB at 3.35 TB/s, NVLink 900 GB/s
  # both ways. DGX H100 data sheet: 8 GPUs, 8 adapters (ConnectX-7) of 400 Gb/s.
  'h100': Gpu(
    kinds=('NVIDIA H100 80GB HBM3',),
    bfloat16_flops=989e12,
    tensorfloat32_flops=494.5e12,
    float32_flops=67e12,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    gpus_per_node=8,
    achievable_flops=0.5,
    achievable_bandwidth=0.8,
  ),
  # NVIDIA H200 SXM data sheet: the H100's FLOP/s and NVLink, 141 GB at 4.8
  # TB/s. DGX H200 data sheet: the DGX H100's adapters.
  'h200': Gpu(
    kinds=('NVIDIA H200',),
    bfloat16_flops=989e12,
    tensorfloat32_flops=494.5e12,
    float32_flops=67e12,
    memory_bytes=141e9,
    memory_bandwidth=4.8e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    gpus_per_node=8,
    achievable_flops=0.5,
    achievable_bandwidth=0.8,
  ),
}

# bfloat16 FLOP/s of these and of devices of which only the peak is needed, by
# `jax.Device.device_kind`; the vendors' data sheets. A device that is not here
# gets no MFU.
PEAK_FLOPS = {
  **{kind: gpu.bfloat16_flops for gpu in GPUS.values() for kind in gpu.kinds},
  'NVIDIA A100-SXM4-40GB': 312e12,
  'NVIDIA A100 80GB PCIe': 312e12,
  'NVIDIA H100 PCIe': 756e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
}
