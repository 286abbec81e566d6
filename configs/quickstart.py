"""A 3.3M-parameter Llama with POET on the Python standard library's source.

Command:   python -m launch.main --config=configs/quickstart.py
Hardware:  2 CPU cores, 2 GB of memory, no download.
Time:      4 to 5 minutes, the tokenizer and the token cache included.
Reaches:   validation loss 4.8, perplexity 119, after 300 steps

Compare optimizers: add --config.optimizer.name=adamw (or muon) and another
--workdir.
"""

import ml_collections


def get_config(arg=None):
  """Returns the config; `arg` is not used."""
  del arg
  config = ml_collections.ConfigDict()
  config.init_from = ''  # <workdir>/checkpoints of a run to take weights from

  config.model = dict(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=6,
    num_kv_heads=6,
    head_dim=32,
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
        kind='stdlib', weight=1.0, files='', field='', directory='', split=''
      ),
    ),
    validation=(),
    holdout_every=20,  # documents; every 20th is held out for validation
    sequence_length=128,
    packing='pack',
    tokenizer=dict(
      file='',  # '' trains a byte-level BPE on the first train_bytes
      vocab_size=4096,
      end_token='<|endoftext|>',
      pad_token='<|pad|>',
      train_bytes=5_000_000,
    ),
    cache_dir='~/.cache/jaxllm/data',
    shuffle_seed=0,
  )

  config.optimizer = dict(
    name='poet',  # adamw, muon or poet; the first two ignore the poet group
    warmup_steps=20,
    final_fraction=0.01,  # of the peak learning rates, at the last step
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
      learning_rate=2e-3,
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-6,
      alternate_sides=False,
      clip_norm=1.0,
      clip_ramp_steps=0,
      block_size=64,
      fraction=0.0,  # POET-FS instead: block_size=0, fraction=0.5
      neumann_terms=3,
      merge_every=25,
      resample_every=1,
      reset_inner=True,
      partitions=1,
      seed=0,
    ),
  )

  # Devices along each axis; -1 takes all that are left.
  config.mesh = dict(data=-1, fsdp=1, tensor=1)

  config.train = dict(
    steps=300,
    batch_size=8,  # rows of sequence_length tokens
    microbatches=1,
    loss_chunk_tokens=1024,  # tokens whose logits exist at once
    seed=0,
    deterministic=True,  # on GPUs; False is faster, and a resume not bitwise
  )
  config.evaluate = dict(every=50, max_batches=8)  # steps; batches each time
  config.sample = dict(
    prompts=('def', 'import', 'class'),
    max_new_tokens=64,
    temperature=0.8,
    top_k=40,
    top_p=1.0,
  )

  config.checkpoint = dict(every=100, keep_last=2, keep_every=0)
  config.launch = dict(
    max_restarts=100,
    max_restarts_without_progress=3,
    backoff_s=1.0,
    grace_s=60.0,
    join_timeout_s=300.0,  # for the hosts and processes of the run to meet
    heartbeat_timeout_s=30.0,  # after which a silent host is lost
    collective_timeout_s=600.0,  # after which a call to a hung process fails
    stuck_timeout_s=1800.0,  # without a word, at the most
  )
  config.log = dict(
    tensorboard=True,
    compilation_cache_dir='~/.cache/jaxllm/compilation',
  )
  config.profile = dict(start=0, steps=0)  # trace so many steps from start on
  return config
