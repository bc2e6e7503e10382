from __future__ import annotations

from random import Random
from typing import cast

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from darts_server.offline.demo.problems import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, RECHECK, reward, sample_problem
from darts_server.offline.demo.server import MODEL
from examples.tiny_rl.batches import IGNORED, PARTS, collate, draw_batch, parts_of
from examples.tiny_rl.demonstrations import CLEAN, STANDARD, VARIANTS, demonstration
from examples.tiny_rl.tokenizer import EOS_ID, VOCABULARY_SIZE, build_tokenizer
from examples.tiny_rl.warm_start import Recipe, train
from tests.offline.demo.test_problems import EXAMPLE


@pytest.fixture(scope="module")
def committed_tokenizer() -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(MODEL))


def test_clean_demonstrations_are_right_and_never_recheck() -> None:
    assert demonstration(EXAMPLE, Random(0), CLEAN) == "a-5=2b*4=8c-8=0d+7=7#7"
    rng = Random(5)
    for _ in range(300):
        problem = sample_problem(rng)
        text = demonstration(problem, rng, CLEAN)
        assert reward(problem, text) == 1.0
        assert RECHECK not in text
        assert len(text) == 5 * len(problem.chain) + 2


def test_prompts_fit_their_limit_in_tokens_and_looped_chains_the_limit_of_answers() -> None:
    rng, tokenizer = Random(7), build_tokenizer()
    lengths = [len(tokenizer.encode(sample_problem(rng, "hard").prompt)) for _ in range(200)]
    assert max(lengths) == MAX_PROMPT_TOKENS
    for _ in range(50):
        problem = sample_problem(rng, "looped")
        assert len(tokenizer.encode(problem.prompt)) < MAX_PROMPT_TOKENS
        assert len(tokenizer.encode(demonstration(problem, rng))) < MAX_RESPONSE_TOKENS


def test_tokenizer_is_one_character_a_token_and_decodes_to_the_same_text(
    committed_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng, tokenizer = Random(8), committed_tokenizer
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert len(tokenizer) == VOCABULARY_SIZE
    for _ in range(50):
        problem = sample_problem(rng)
        text = problem.prompt + demonstration(problem, rng, STANDARD)
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text


def test_loss_falls_on_the_response_and_its_end_only() -> None:
    tokenizer = build_tokenizer()
    samples = draw_batch(Random(9), tokenizer, VARIANTS["standard"], batch_tokens=1500)
    parts = list(parts_of(samples))
    assert [sample for part in parts for sample in part] == samples
    assert 1 < len(parts) <= PARTS + 1
    for part in parts:
        tokens, labels = collate(part)
        for row, sample in enumerate(part):
            length = len(sample.tokens)
            assert tokens[row, :length].tolist() == sample.tokens
            assert labels[row, sample.prompt_length : length].tolist() == sample.tokens[sample.prompt_length :]
            assert (labels[row] != IGNORED).sum().item() == length - sample.prompt_length


def test_training_twice_with_one_seed_gives_the_same_weights() -> None:
    recipe = Recipe(steps=3, batch_tokens=200, warmup_steps=1)
    first, second = (train(VARIANTS["mixed"], recipe, seed=0).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_committed_model_prefers_a_worked_chain_on_an_easy_problem(
    committed_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    prompt = committed_tokenizer.encode(EXAMPLE.prompt)
    chain = committed_tokenizer.encode(demonstration(EXAMPLE, Random(0), CLEAN))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + chain])).logits[0]
    likeliest = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert committed_tokenizer.decode(likeliest) == committed_tokenizer.decode(chain)
