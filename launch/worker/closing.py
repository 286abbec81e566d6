"""The end of a run: sampled continuations, and where everything lies."""

import functools
import os

import jax
import numpy as np

from jaxllm import generate as generate_lib
from launch.control.protocol import EventKind
from launch.worker import agreement
from launch.worker import durable
from launch.worker import loop
from launch.worker import outcome


def sample(job: loop.Job, trained: loop.Trained) -> None:
  """Continues the config's prompts; into `samples.txt` and to the user."""
  options, tokenizer = job.settings.sample, job.data.tokenizer
  if not options.prompts:
    return
  job.reporter.send(
    EventKind.PHASE,
    name='sampling',
    total=len(options.prompts),
    unit='texts',
    start=0,
  )
  encoded = tokenizer.encode_batch(list(options.prompts))
  lengths = np.array([len(tokens) for tokens in encoded], np.int32)
  prompts = np.full((len(encoded), lengths.max()), tokenizer.pad_id, np.int32)
  for row, tokens in zip(prompts, encoded, strict=True):
    row[: len(tokens)] = tokens
  with outcome.memory_report(job.settings):
    # Every process takes part, and the first one reads all of it.
    whole = jax.sharding.NamedSharding(
      trained.program.mesh, jax.sharding.PartitionSpec()
    )
    generate = functools.partial(
      generate_lib.generate,
      trained.program.model,
      max_new_tokens=options.max_new_tokens,
      temperature=options.temperature,
      top_k=options.top_k,
      top_p=options.top_p,
      end_tokens=(tokenizer.end_id,),
      pad_id=tokenizer.pad_id,
    )
    seed = job.settings.train.seed
    generation = jax.device_get(
      jax.jit(
        lambda params: generate(params, prompts, lengths, jax.random.key(seed)),
        out_shardings=whole,
      )(trained.params)
    )
  if not agreement.is_first():
    return
  job.reporter.send(EventKind.PROGRESS, done=len(options.prompts))
  texts = []
  for prompt, tokens, length in zip(
    options.prompts, generation.tokens, generation.lengths, strict=True
  ):
    continuation = tokenizer.decode(tokens[: int(length)].tolist())
    texts.append(f'--- sample: {prompt!r}\n{prompt}{continuation}')
    job.reporter.send(EventKind.MESSAGE, text=texts[-1])
  path = os.path.join(job.workdir, 'samples.txt')
  with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
    file.write('\n'.join(texts) + '\n')
  durable.publish(f'{path}.tmp', path)


def summarize(job: loop.Job, trained: loop.Trained) -> None:
  """Tells the user what came out, where it lies and what to try next."""
  workdir, settings = job.workdir, job.settings
  records = trained.records
  validations = [r for r in records if 'validation_loss' in r]
  lines = [f'--- done: {len(records)} steps with {settings.optimizer.name}']
  lines.append(
    f'training loss    {records[0]["loss"]:.4f} -> {records[-1]["loss"]:.4f}'
  )
  if validations:
    first, last = validations[0], validations[-1]
    lines.append(
      f'validation loss  {first["validation_loss"]:.4f} (step {first["step"]})'
      f' -> {last["validation_loss"]:.4f} (step {last["step"]}), perplexity'
      f' {last["validation_perplexity"]:.2f}'
    )
  places = {
    'loss curve': 'loss.png',
    'all metrics': 'metrics.jsonl',
    'samples': 'samples.txt' if settings.sample.prompts else None,
    'checkpoints': 'checkpoints',
    'TensorBoard': 'tensorboard' if settings.log.tensorboard else None,
    'event journal': 'journal.sqlite',
  }
  for name, place in places.items():
    if place is not None:
      lines.append(f'{name:16} {os.path.join(workdir, place)}')
  other = 'adamw' if settings.optimizer.name == 'poet' else 'poet'
  lines.append(
    f'try next: the same command with --config.optimizer.name={other}'
    f' --workdir={os.path.normpath(workdir)}-{other}'
  )
  job.reporter.send(EventKind.MESSAGE, text='\n'.join(lines))
