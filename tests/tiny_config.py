"""The smallest real run, for tests: `--config=tests/tiny_config.py:DIRECTORY`.

DIRECTORY holds `*.txt`, the text to train on, and gets `cache/`.
"""

import ml_collections


def get_config(arg):
  """Returns the config of 24 steps on the texts in the directory `arg`."""
  config = ml_collections.ConfigDict()
  config.init_from = ''
  config.model = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_epsilon=1e-6,
    attention_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
    initializer='normalized',
    init_scale=1.0,
    embedding_stddev=0.02,
    compute_dtype='float32',
    remat='none',
    attention='xla',
  )
  config.data = dict(
    train=(
      dict(
        kind='text',
        weight=1.0,
        files=f'{arg}/*.txt',
        field='',
        directory='',
        split='',
      ),
    ),
    validation=(),
    holdout_every=4,
    sequence_length=32,
    packing='pack',
    tokenizer=dict(
      file='',
      vocab_size=300,
      end_token='<|endoftext|>',
      pad_token='<|pad|>',
      train_bytes=20_000,
    ),
    cache_dir=f'{arg}/cache',
    shuffle_seed=0,
  )
  config.optimizer = dict(
    name='poet',
    warmup_steps=4,
    final_fraction=0.1,
    adamw=dict(
      learning_rate=3e-3,
      beta1=0.9,
      beta2=0.95,
      epsilon=1e-8,
      weight_decay=0.01,
      clip_norm=1.0,
    ),
    muon=dict(learning_rate=3e-3, beta=0.95, weight_decay=0.01),
    poet=dict(
      inner='adam',
      learning_rate=4e-3,
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-6,
      alternate_sides=False,
      clip_norm=1.0,
      clip_ramp_steps=0,
      block_size=8,
      fraction=0.0,
      neumann_terms=3,
      merge_every=5,  # several merges, at steps that are no checkpoint's
      resample_every=1,
      reset_inner=True,
      partitions=1,
      seed=0,
    ),
  )
  config.mesh = dict(data=-1, fsdp=1, tensor=1)
  config.train = dict(
    steps=24,
    batch_size=16,
    microbatches=2,
    loss_chunk_tokens=64,
    seed=0,
    deterministic=True,
  )
  config.evaluate = dict(every=12, max_batches=2)
  config.sample = dict(
    prompts=(), max_new_tokens=4, temperature=0.0, top_k=0, top_p=1.0
  )
  config.checkpoint = dict(every=3, keep_last=2, keep_every=0)
  config.launch = dict(
    max_restarts=20,
    max_restarts_without_progress=3,
    backoff_s=0.1,
    grace_s=60.0,
    join_timeout_s=120.0,  # for the hosts and processes of the run to meet
    heartbeat_timeout_s=30.0,  # after which a silent host is lost
    collective_timeout_s=120.0,  # after which a call to a hung process fails
    stuck_timeout_s=1800.0,  # without a word, at the most
  )
  config.log = dict(tensorboard=False, compilation_cache_dir=f'{arg}/cache/xla')
  config.profile = dict(start=0, steps=0)
  return config
