"""A 1.3B Llama with POET on C4, as published.

Command:   python -m launch.main --config=configs/poet_1b.py
Hardware:  published on 8 GPUs (64 rows each); raise
           train.microbatches until it fits yours.
Time:      500k steps of 512 rows of 256 tokens; not run here.
Reaches:   published validation perplexity 14.56 (POET-BS, b = 256; AdamW
           14.73, which trains 1.21B linear parameters).

Qiu et al., `arXiv 2506.08001 <https://arxiv.org/abs/2506.08001>`_, appendix E,
tables 8 to 10. The authors use T5's tokenizer, one document per row; here a
byte-level BPE of the same size is trained on the corpus, unless
data.tokenizer.file names a tokenizer.json. Also different here: weights,
moments are float32 (there bfloat16), POET's gradients are clipped apart from
the others' (there jointly), and the clip threshold does not drop after merges.

Data: the files c4-train.*.json.gz and c4-validation.*.json.gz of allenai/c4
(English) under data/c4/en, or --config.data.train[0].files=GLOB.
"""

import ml_collections


def get_config(arg=None):
  """Returns the config; `arg` is not used."""
  del arg
  config = ml_collections.ConfigDict()
  config.init_from = ''  # <workdir>/checkpoints of a run to take weights from

  config.model = dict(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5376,  # the published width for block-stochastic POET
    num_layers=24,
    num_heads=32,
    num_kv_heads=32,
    head_dim=64,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_epsilon=1e-6,
    attention_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
    initializer='normalized',
    init_scale=1.0,
    embedding_stddev=0.02,
    compute_dtype='bfloat16',
    remat='dots',
    attention='xla',
  )

  config.data = dict(
    train=(
      dict(
        kind='jsonl',
        weight=1.0,
        files='data/c4/en/c4-train.*.json.gz',
        field='text',
        directory='',
        split='',
      ),
    ),
    validation=(
      dict(
        kind='jsonl',
        weight=1.0,
        files='data/c4/en/c4-validation.*.json.gz',
        field='text',
        directory='',
        split='',
      ),
    ),
    holdout_every=0,
    sequence_length=256,
    packing='pad',
    tokenizer=dict(
      file='',  # '' trains a byte-level BPE on the first train_bytes
      vocab_size=32000,
      end_token='<|endoftext|>',
      pad_token='<|pad|>',
      train_bytes=500_000_000,
    ),
    cache_dir='~/.cache/jaxllm/data',
    shuffle_seed=0,
  )

  config.optimizer = dict(
    name='poet',  # adamw, muon or poet; the first two ignore the poet group
    warmup_steps=0,
    final_fraction=0.01,  # of the peak learning rates, at the last step
    adamw=dict(
      learning_rate=1e-3,
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-6,
      weight_decay=0.01,
      clip_norm=0.1,
    ),
    muon=dict(learning_rate=1e-3, beta=0.95, weight_decay=0.01),
    poet=dict(
      inner='adam',
      learning_rate=1e-3,  # 2e-3 for block 128, 4e-3 for block 64
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-6,
      alternate_sides=False,
      clip_norm=0.1,
      clip_ramp_steps=10,
      block_size=256,
      fraction=0.0,  # POET-FS instead: block_size=0, fraction=0.5
      neumann_terms=3,
      merge_every=400,
      resample_every=1,
      reset_inner=True,
      partitions=1,
      seed=0,
    ),
  )

  # Devices along each axis; -1 takes all that are left.
  config.mesh = dict(data=-1, fsdp=1, tensor=1)

  config.train = dict(
    steps=500_000,
    batch_size=512,  # rows of sequence_length tokens
    microbatches=8,
    loss_chunk_tokens=16384,  # tokens whose logits exist at once
    seed=0,
    deterministic=True,  # on GPUs; False is faster, and a resume not bitwise
  )
  config.evaluate = dict(every=1000, max_batches=20)  # steps; batches each time
  config.sample = dict(
    prompts=('The', 'In a', 'How to'),
    max_new_tokens=128,
    temperature=0.8,
    top_k=0,
    top_p=0.95,
  )

  config.checkpoint = dict(every=1000, keep_last=3, keep_every=50_000)
  config.launch = dict(
    max_restarts=100,
    max_restarts_without_progress=3,
    backoff_s=5.0,
    grace_s=300.0,
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
