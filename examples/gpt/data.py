"""Real English text that every Python carries: the documentation topics behind ``help()``, about half a megabyte."""

import math
from collections import Counter
from collections.abc import Iterable
from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

#: Character tokens: the newline, the printable ASCII characters, and one for everything else. 97 of them, a prime:
#: no tensor-parallel degree divides the vocabulary. Fixed, because the text differs from one Python to the next.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
VOCAB_SIZE = len(CHARACTERS)
_TOKEN_OF = {character: token for token, character in enumerate(CHARACTERS)}


def encode(text: str) -> Tensor:
    """Tokens of ``text``, (characters,) int64."""
    return torch.tensor([_TOKEN_OF.get(character, VOCAB_SIZE - 1) for character in text])


def decode(tokens: Iterable[int]) -> str:
    """The text of ``tokens``."""
    return "".join(CHARACTERS[int(token)] for token in tokens)


def unigram_entropy(tokens: Tensor) -> float:
    """Entropy of the token frequencies in nats: the loss of a model that knows nothing but how common a token is."""
    counts = Counter(tokens.tolist()).values()
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in counts)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``seq_len`` tokens and the tokens that follow them, one window every ``stride`` tokens."""

    def __init__(self, tokens: Tensor, seq_len: int, stride: int) -> None:
        self.tokens, self.seq_len, self.stride = tokens, seq_len, stride

    def __len__(self) -> int:
        return max((len(self.tokens) - self.seq_len - 1) // self.stride + 1, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.stride : index * self.stride + self.seq_len + 1]
        return window[:-1], window[1:]


class PythonDocs(pl.LightningDataModule):
    """The text as character tokens; its last tenth is for validation.

    Args:
        seq_len: tokens per sample.
        batch_size: samples per **replica**: a step of the job takes ``replicas * batch_size`` of them.
        num_workers: processes that load the data, per rank. The text lies in memory, so 0 is fastest.
    """

    def __init__(self, seq_len: int = 128, batch_size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        tokens = encode("\n\n".join(topics[name] for name in sorted(topics)))
        split = len(tokens) * 9 // 10
        self.train_tokens, self.val_tokens = tokens[:split], tokens[split:]

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        dataset = Windows(self.train_tokens, self.seq_len, stride=self.seq_len // 2)
        return DataLoader(dataset, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        dataset = Windows(self.val_tokens, self.seq_len, stride=self.seq_len)
        return DataLoader(dataset, 4 * self.batch_size, num_workers=self.num_workers)
