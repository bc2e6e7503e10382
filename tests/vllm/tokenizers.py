"""Tokenizers for tests."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
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
