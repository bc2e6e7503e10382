"""Tokenizers for tests."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import TokenizersBackend


def multi_byte_tokenizer() -> TokenizersBackend:
    """Make a tokenizer of as many tokens, where characters of three bytes have tokens of two and of one byte each."""
    pieces: list[bytes] = []
    for number in range(32):
        encoded = chr(0x65E5 + 77 * number).encode()
        pieces += [encoded[:2], encoded[2:] + chr(ord("A") + number).encode()]
    letters = dict(zip(range(256), map(_byte_letter, range(256)), strict=True))
    vocabulary = {"".join(letters[byte] for byte in piece): number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizersBackend(tokenizer_object=tokenizer)


def _byte_letter(byte: int) -> str:
    """Return the letter that stands for a byte in the tokens of byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(256) if each not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))
