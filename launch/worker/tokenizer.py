"""Text to token ids and back: a byte-level BPE, trained here or given.

Byte-level, so that every string has tokens and decodes to itself. Two special
tokens: one ends each document, one pads. The text of a document never yields a
special token, even where it spells one.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import difflib
import os
import re

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers
import xxhash

from launch.worker import durable
from launch.worker import fingerprint
from launch.worker import sources

# The library holds about 100 bytes per token while it encodes, so a longer
# document goes through in pieces.
_PIECE_CHARACTERS = 1 << 20

# A space between two words begins a pre-token in every GPT-style splitting
# rule, so cutting there changes no token.
_CUT = re.compile(r'(?<=\S) (?=\S)')


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """Which tokenizer to use.

  Attributes:
    file: a `tokenizer.json` of the tokenizers library; '' trains one.
    vocab_size: tokens of a trained tokenizer, special tokens included; a given
      file brings its own.
    end_token: the token that ends a document.
    pad_token: the token that fills rows; it may be the end token.
    train_bytes: bytes of text to train on.
  """

  file: str
  vocab_size: int
  end_token: str
  pad_token: str
  train_bytes: int


class Tokenizer:
  """A tokenizer with its two special tokens.

  Attributes:
    vocab_size: one more than the largest id.
    end_id: id of the token that ends a document.
    pad_id: id of the token that fills rows.
    digest: names everything that decides the ids, as a hex string.
  """

  def __init__(self, text: str, end_token: str, pad_token: str):
    """Makes a tokenizer of the text of a `tokenizer.json`.

    Raises:
      ValueError: the text is no tokenizer, or it lacks a special token.
    """
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(f'not a tokenizer: {error}') from error
    # A file may carry settings for fixed-size inputs, which would lose text.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.encode_special_tokens = True
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self._text = text
    self.vocab_size = max(vocabulary.values(), default=-1) + 1
    self.end_id = self._find('end_token', end_token, vocabulary)
    self.pad_id = self._find('pad_token', pad_token, vocabulary)
    self.digest = xxhash.xxh3_128_hexdigest(
      '\0'.join((text, end_token, pad_token)).encode()
    )

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes texts on all cores; no special token is added or recognised.

    Returns:
      An int32 array `[tokens]` for each text.
    """
    pieces, owners = [], []
    for owner, text in enumerate(texts):
      for piece in _pieces(text):
        pieces.append(piece)
        owners.append(owner)
    parts = [[] for _ in texts]
    encodings = self._tokenizer.encode_batch_fast(
      pieces, add_special_tokens=False
    )
    for owner, encoding in zip(owners, encodings, strict=True):
      parts[owner].append(np.array(encoding.ids, np.int32))
    return [
      part[0] if len(part) == 1 else np.concatenate(part) for part in parts
    ]

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids; special tokens are left out."""
    return self._tokenizer.decode(list(ids), skip_special_tokens=True)

  def save(self, file: str) -> None:
    """Writes a `tokenizer.json`, unless the file is that already.

    The file is complete or as before, even after power loss.
    """
    content = self._text.encode()
    if os.path.exists(file):
      with open(file, 'rb') as stream:
        if stream.read() == content:
          return
    with open(f'{file}.tmp', 'wb') as stream:
      stream.write(content)
    durable.publish(f'{file}.tmp', file)

  def _find(self, setting, token, vocabulary):
    if token in vocabulary:
      return vocabulary[token]
    added = self._tokenizer.get_added_tokens_decoder().values()
    names = [added_token.content for added_token in added]
    near = difflib.get_close_matches(token, names, n=5, cutoff=0.0)
    raise ValueError(
      f'{setting} {token!r} is not in its vocabulary; its special tokens are '
      f'{", ".join(near) or "none"} (the nearest first). Set '
      f'data.tokenizer.{setting}.'
    )


def prepare(
  config: TokenizerConfig,
  train_on: Sequence[sources.Source],
  cache_dir: str,
  report: durable.Report,
  tell: durable.Tell,
) -> Tokenizer:
  """The user's tokenizer, or one trained on these sources, before or now.

  Raises:
    ValueError: as `load` and `train`, or the sources cannot be read.
  """
  if config.file:
    return load(config)
  content = {
    'settings': dataclasses.asdict(config),
    'sources': [
      {
        **dataclasses.asdict(source),
        'files': fingerprint.of_files(sources.list_files(source)),
      }
      for source in train_on
    ],
  }
  name = f'tokenizer-{fingerprint.of_json(content)}'
  directory = os.path.join(cache_dir, name)
  file = os.path.join(directory, 'tokenizer.json')
  if not os.path.exists(file):
    with durable.locked(directory, tell):
      if not os.path.exists(file):
        documents = sources.sample(train_on, config.train_bytes)
        documents = _reported(documents, config.train_bytes, report)
        train(documents, config).save(file)
  return load(dataclasses.replace(config, file=file))


def load(config: TokenizerConfig) -> Tokenizer:
  """Reads the tokenizer at `config.file`.

  Raises:
    ValueError: the file is missing, no tokenizer, or lacks a special token.
  """
  try:
    with open(os.path.expanduser(config.file), encoding='utf-8') as stream:
      text = stream.read()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or 'it is not UTF-8 text'
    raise ValueError(
      f'data.tokenizer.file {config.file} cannot be read: {reason}; give the '
      "path of a tokenizer.json, or '' to train one."
    ) from error
  try:
    return Tokenizer(text, config.end_token, config.pad_token)
  except ValueError as error:
    raise ValueError(f'{config.file}: {error}') from error


def train(documents: Iterable[str], config: TokenizerConfig) -> Tokenizer:
  """Trains a byte-level BPE; the same documents give the same tokenizer.

  Pad is id 0, end is id 1, the 256 bytes follow. Fewer documents than the
  vocabulary needs give a smaller vocabulary.

  Raises:
    ValueError: the vocabulary has no room for the 256 bytes, or there is to be
      no text.
  """
  special = list(dict.fromkeys((config.pad_token, config.end_token)))
  smallest = 256 + len(special)
  if config.train_bytes < 1:
    raise ValueError(
      f'data.tokenizer.train_bytes is {config.train_bytes}; it must be at '
      'least 1.'
    )
  if config.vocab_size < smallest:
    raise ValueError(
      f'data.tokenizer.vocab_size is {config.vocab_size}; a byte-level '
      f'tokenizer needs at least {smallest}.'
    )
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=config.vocab_size,
    special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(documents, trainer)
  return Tokenizer(tokenizer.to_str(), config.end_token, config.pad_token)


def _reported(documents, total, report):
  """Passes documents on, with a report for about every percent of them."""
  name = 'Reading text for the tokenizer'
  done = reported = 0
  for text in documents:
    yield text
    done += len(text.encode())
    if done - reported >= total // 100:
      report(name, min(done, total), total, 'bytes')
      reported = done
  report(name, total, total, 'bytes')


def _pieces(text: str) -> list[str]:
  """Cuts a long text before a space between words."""
  pieces, begin = [], 0
  while len(text) - begin > _PIECE_CHARACTERS:
    cut = _CUT.search(text, begin + _PIECE_CHARACTERS)
    if cut is None:
      break
    pieces.append(text[begin : cut.start()])
    begin = cut.start()
  return [*pieces, text[begin:]]
