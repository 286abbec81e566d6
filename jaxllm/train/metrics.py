"""Numbers derived from a step's own: perplexity, MFU, signs of divergence."""

import math

from jaxllm.train import devices as devices_lib

# Cayley-Neumann at k = 3 shrinks a plane by theta^4: 6% at 0.5, all of it at 1.
ANGLE_WARNING = 0.5
ANGLE_LIMIT = 1.0


def perplexity(loss: float) -> float:
  """exp(loss), infinite where it overflows.

  Example:
    perplexity(0.0) = 1.0
  """
  return math.exp(loss) if loss < 700 else math.inf


def model_flops_utilization(
  tokens_per_s: float, flops_per_token: float, device_kind: str, devices: int
) -> float | None:
  """Share of the devices' peak that the model's own FLOPs use, or None.

  Args:
    tokens_per_s: over all devices.
    flops_per_token: of training, `decoder.flops_per_token`.
    device_kind: `jax.Device.device_kind`.
    devices: how many of them.
  """
  peak = devices_lib.PEAK_FLOPS.get(device_kind)
  if peak is None:
    return None
  return tokens_per_s * flops_per_token / (peak * devices)


def problem(values: dict[str, float]) -> str | None:
  """Why training must not go on from these metrics, or None.

  Args:
    values: of one step, as `train_step` names them.
  """
  # The norm and the validation loss are of the weights after the update.
  for name in ('loss', 'grad_norm', 'param_norm', 'validation_loss'):
    if not math.isfinite(values.get(name, 0.0)):
      return (
        f'{name} is {values[name]}: lower the learning rate, clip harder, or'
        ' look at the data of this step'
      )
  angle = values.get('poet/largest_angle', 0.0)
  if not angle < ANGLE_LIMIT:
    return (
      f"POET's largest angle is {angle:.3f}: the Cayley-Neumann series diverges"
      f' from {ANGLE_LIMIT:g} on; lower optimizer.poet.learning_rate or'
      ' optimizer.poet.merge_every'
    )
  return None
