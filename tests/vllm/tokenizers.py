"""Tokenizers for tests."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import TokenizersBackend
from transformers.convert_slow_tokenizer import bytes_to_unicode


def multi_byte_tokenizer() -> TokenizersBackend:
    """Make a tokenizer of as many tokens, where characters of three bytes have tokens of two and of one byte each."""
    pieces: list[bytes] = []
    for number in range(32):
        encoded = chr(0x65E5 + 77 * number).encode()
        pieces += [encoded[:2], encoded[2:] + chr(ord("A") + number).encode()]
    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in piece): number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizersBackend(tokenizer_object=tokenizer)


def byte_level_tokenizer(words: Iterable[str]) -> TokenizersBackend:
    """Make a tokenizer of the kind that most models have: all bytes, some of their pairs in the words, and two more."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(words, BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>"]))
    tokenizer.add_tokens(["<tool>"])
    return TokenizersBackend(tokenizer_object=tokenizer)
