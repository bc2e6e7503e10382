"""The tokenizer: one character is one token, and nothing is added before or after."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from darts_server.offline.demo.problems import ALPHABET

VOCABULARY_SIZE = 64
PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
PAD_ID = 0
EOS_ID = 1

# The template only joins the messages, so that chat and completion requests have the same tokens.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] or '' }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer. Reserved tokens fill it up to VOCABULARY_SIZE."""
    tokens = [PAD, EOS, UNKNOWN, *ALPHABET]
    tokens += [f"<reserved_{index}>" for index in range(len(tokens), VOCABULARY_SIZE)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=320,
    )
