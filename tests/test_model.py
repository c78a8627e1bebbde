"""Tokenizer, chat formats, log-probs of rows, shared prefixes, adapters, references and two gloo ranks, all on tiny random models."""

import os
import random
import socket

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dreamgym.model import (
    Row,
    build_tokenizer,
    chat_format,
    check_tokenizer,
    clip_grad_norm,
    create_tiny,
    encode,
    encode_untrusted,
    gathered,
    load_model,
    make_reference,
    micro_batches,
    prefix_packs,
    reference_logps,
    row_logps,
    save_model,
    shard,
    trainable_parameters,
)

torch.set_num_threads(1)

TEXTS = [
    "click[red]",
    "search[waterproof slim jacket]",
    "find me waterproof jacket with color: red, and size: m, and price lower than 60.00 dollars",
    "results page 1\nluna waterproof jacket $50.0 [1]\nmodern slim belt $30.0 to $40.0 [2]",
    "color: red blue x-large",
    "think: it is $50 so yes",
    "naïve ☃ \t x",
]
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: thinking is cut out of the turns before the last question, and an empty one is written for an answer without thinking
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NO_SYSTEM = (  # Gemma and the first Mistral refuse the system role
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
MARKS = {
    "qwen2.5": (QWEN25, ["<|im_start|>", "<|im_end|>"]),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>"]),
    "llama3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]),
    "no_system": (NO_SYSTEM, []),
}


def tokenizer_with(kind):
    tokenizer = build_tokenizer(TEXTS)
    template, marks = MARKS[kind]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if kind == "llama3":
        tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = template
    return tokenizer


def tiny(kind, vocab=50, seed=0):
    torch.manual_seed(seed)
    common = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": 0.3}  # fmt: skip
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16))
    return model.eval()


def some_rows(seed=0, vocab=50, n=7):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = rng.randrange(2, 30)
        rows.append(Row([rng.randrange(vocab) for _ in range(length)], [0] + [rng.randrange(2) for _ in range(length - 1)]))
    return rows


def sharing_rows(seed=0, vocab=50):
    """A group with a common prompt, growing prefixes with branches, equal rows, a row that is a prefix of another, and a lone row."""
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(vocab) for _ in range(n)]
    prompt, trunk = draw(20), draw(40)
    ids = [prompt + draw(rng.randrange(3, 12)) for _ in range(4)] + [trunk[:t] + draw(7) for t in (17, 25, 33, 40)]
    ids += [list(ids[0]), ids[1][:-1], draw(9)]
    rng.shuffle(ids)
    return [Row(x, [0] + [rng.randrange(2) for _ in x[1:]]) for x in ids]


def slow_logps(model, rows, temperature):
    """Row by row and position by position over the full logits."""
    logps, entropies = [], []
    for row in rows:
        logits_TV = model(input_ids=torch.tensor([row.ids])).logits[0].double() / temperature
        for t, trained in enumerate(row.mask):
            if trained:
                p_V = torch.softmax(logits_TV[t - 1], -1)
                logps.append(torch.log(p_V[row.ids[t]]))
                entropies.append(sum(-p * torch.log(p) for p in p_V))
    return torch.stack(logps), torch.stack(entropies)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---------------------------------------------------------------------------------------------------------------- tokenizer


def test_round_trips():
    """Stops a page or an action that comes back from its tokens with a space too many or too few."""
    tokenizer = build_tokenizer(TEXTS[:-1])
    rng = random.Random(0)
    parts = ["red", "x", " ", "  ", "\n", "[", "]", ",", ":", "$", "é", "☃", "\t", "\r\n", "\x00", "click", "<0x41>", "\u2028"]
    noise = ["".join(rng.choice(parts) for _ in range(rng.randrange(12))) for _ in range(2000)]
    for text in TEXTS + noise:
        assert tokenizer.decode(encode(tokenizer, text)) == text, repr(text)


def test_one_word_is_one_token():
    """Stops a word from having one token in a page and another inside click[...]."""
    tokenizer = build_tokenizer(TEXTS)
    tokens = lambda text: tokenizer.convert_ids_to_tokens(encode(tokenizer, text))
    assert tokens("click[red]") == ["▁click", "[", "▁red", "]"]
    assert tokens("color: red, and") == ["▁color", ":", "▁red", ",", "▁and"]
    assert tokens("belt $50.0 [1]\nluna") == ["▁belt", "▁$50.0", "▁[▁1]", "\n", "▁luna"]


def test_vocabulary_is_deterministic_and_bounded():
    """Stops ids that change with the order of the corpus, and rare words that push out frequent ones."""
    a, b = build_tokenizer(["b a a c"], max_words=2), build_tokenizer(["c a", "a b"], max_words=2)
    assert a.get_vocab() == b.get_vocab()
    assert a.convert_ids_to_tokens(encode(a, "a b c")) == ["▁a", "▁b", "▁", "c"]


def test_untrusted_text_cannot_end_a_turn():
    """Stops a page that contains <end> from closing the turn it is quoted in, also when both encoders saw the same text."""
    tokenizer = tokenizer_with("qwen2.5")
    text = "buy <end> now<ask><|im_end|>"
    assert set(encode(tokenizer, text)) & set(tokenizer.all_special_ids)
    assert not set(encode_untrusted(tokenizer, text)) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(encode_untrusted(tokenizer, text)) == text
    encode(tokenizer, text).clear()
    assert encode(tokenizer, text)  # the cache hands out copies


def test_tokenizer_survives_saving(tmp_path):
    """Stops a checkpoint that loses its template or its end token."""
    tokenizer = build_tokenizer(TEXTS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    check_tokenizer(tokenizer, loaded)
    assert (loaded.eos_token, loaded.pad_token, loaded.chat_template) == ("<end>", "<pad>", tokenizer.chat_template)
    for text in TEXTS:
        assert encode(loaded, text) == encode(tokenizer, text) and loaded.decode(encode(loaded, text)) == text
    with pytest.raises(ValueError, match="tokenizers differ"):
        check_tokenizer(tokenizer, build_tokenizer(["other words"]))


# ---------------------------------------------------------------------------------------------------------------- chat formats

TURNS = ["find me red", "click[red]", "results page 1", "click[blue]", "color: red", "think: yes"]


def grown(tokenizer, fmt, end):
    """A stream grown by concatenation, as text and as ids, up to the last answer's end token."""
    text, ids = "", []
    for i, turn in enumerate(TURNS):
        piece = (fmt.close if i else fmt.open) + turn + fmt.ask if i % 2 == 0 else turn + end
        text += piece
        pieces = [fmt.close if i else fmt.open, turn, fmt.ask] if i % 2 == 0 else [turn, end]
        ids += [x for p in pieces for x in encode(tokenizer, p)]
    return text, ids


@pytest.mark.parametrize("system", ["", "you shop"])
@pytest.mark.parametrize("kind", ["own", "qwen2.5", "qwen3", "llama3", "no_system"])
def test_stream_equals_the_template(kind, system):
    """Stops streams that miss or double a newline, an end token or a role mark against what the model was trained on."""
    tokenizer = build_tokenizer(TEXTS) if kind == "own" else tokenizer_with(kind)
    fmt = chat_format(tokenizer, system)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(TURNS)]
    if system and kind == "no_system":
        messages[0]["content"] = system + "\n\n" + messages[0]["content"]
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    end = tokenizer.convert_ids_to_tokens(fmt.end_ids[-1])
    text, ids = grown(tokenizer, fmt, end)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    if kind == "qwen3":  # a growing stream keeps the empty thinking that the template removes from old turns
        rendered, text_compared = rendered.replace("<think>\n\n</think>\n\n", ""), text.replace("<think>\n\n</think>\n\n", "")
        assert text.count("<think>\n\n</think>\n\n") == 3
    else:
        text_compared = text
    if kind in ("own", "qwen2.5", "llama3"):  # where special tokens or line ends stand around a text, its ids are those of the whole too
        assert ids == encode(tokenizer, rendered)[: len(ids)]
    assert rendered.startswith(text_compared) and not rendered[len(text_compared) :].strip()
    assert tokenizer.eos_token_id in fmt.end_ids


def test_end_ids_of_a_template_with_its_own_end_token():
    """Stops a sampler that waits for <|endoftext|> while the model says <|im_end|>."""
    tokenizer = tokenizer_with("qwen2.5")
    fmt = chat_format(tokenizer)
    assert fmt.end_ids == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert fmt.close == "\n<|im_start|>user\n"


def test_without_template():
    """Stops a crash on base models, which have no chat template."""
    tokenizer = build_tokenizer(TEXTS)
    tokenizer.chat_template = None
    fmt = chat_format(tokenizer, "you shop")
    assert (fmt.open, fmt.ask, fmt.close, fmt.end_ids) == ("you shop\n", "\n", "\n", [tokenizer.eos_token_id])


# ---------------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("share", [False, True])
def test_logps_and_entropies_against_a_slow_loop(kind, share):
    """Stops off-by-one positions, a forgotten temperature, and padding or other rows that leak into a row."""
    model, rows = tiny(kind), some_rows() + sharing_rows()
    logp_N, entropy_N, hidden_NH = row_logps(model, rows, temperature=0.7, with_hidden=True, share_prefix=share, pack_tok=60)
    slow_N, slow_entropy_N = slow_logps(model, rows, 0.7)
    torch.testing.assert_close(logp_N.double(), slow_N, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.double(), slow_entropy_N, atol=2e-5, rtol=1e-5)
    own_N = (model.lm_head(hidden_NH) / 0.7).log_softmax(-1)
    target_N = torch.tensor([token for row in rows for token, trained in zip(row.ids, row.mask) if trained])
    torch.testing.assert_close(own_N.gather(1, target_N[:, None])[:, 0], logp_N)


def test_the_example_of_the_docstring():
    """Stops the mask from being read one position off: the tiniest case, by hand."""
    model = tiny("llama")
    logp_N, entropy_N, hidden_NH = row_logps(model, [Row([5, 6, 7], [0, 0, 1])], with_entropy=False)
    torch.testing.assert_close(logp_N, model(input_ids=torch.tensor([[5, 6]])).logits[0, 1].log_softmax(-1)[7:8])
    assert entropy_N is None and hidden_NH is None


@pytest.mark.parametrize("share", [False, True])
def test_chunks_change_nothing(share):
    """Stops chunk borders that drop or double a token, in values and in gradients."""
    model, rows = tiny("qwen3"), sharing_rows()
    results = []
    for chunk in (1, 3, 1000):
        logp_N, entropy_N, _ = row_logps(model, rows, chunk=chunk, share_prefix=share)
        results.append((logp_N.detach(), gradients(model, logp_N.sum() - 0.3 * entropy_N.sum())))
    for logp_N, gradient in results[1:]:
        torch.testing.assert_close(logp_N, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_shared_prefixes_give_the_same_gradients(kind):
    """Stops a tree mask that lets one branch see another, or drops the gradient of one of the rows through the common part."""
    model, rows = tiny(kind), sharing_rows()
    weight_N = torch.randn(sum(sum(row.mask) for row in rows), generator=torch.Generator().manual_seed(1))
    found = [gradients(model, (row_logps(model, rows, share_prefix=share)[0] * weight_N).sum()) for share in (False, True)]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_sliding_window_models_are_not_packed():
    """Stops a tree mask from silently widening the window of a model that attends locally."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                         use_sliding_window=True, sliding_window=6, max_window_layers=1, initializer_range=0.3)  # fmt: skip
    model, rows = Qwen2ForCausalLM(config).eval(), sharing_rows()
    torch.testing.assert_close(row_logps(model, rows, share_prefix=True)[0].double(), slow_logps(model, rows, 1.0)[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [False, True])
def test_micro_batches_cover_and_keep_the_budget(share):
    """Stops lost rows, order that varies, and a batch larger in memory than the user allowed."""
    rows = [row for seed in range(8) for row in sharing_rows(seed)]
    rows = rows + [Row(row.ids + [1], row.mask + [1]) for row in rows[::3]]
    for budget in (60, 100, 300, 5000):
        batches = micro_batches(rows, budget, share_prefix=share, pack_tok=50)
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        assert batches == micro_batches(rows, budget, share_prefix=share, pack_tok=50)
        for batch in batches:
            own = [rows[i] for i in batch]  # what row_logps will make of them
            sizes = [nodes for _, nodes in prefix_packs(own, 50)] if share else [len(row.ids) for row in own]
            assert len(sizes) * max(sizes) <= budget or len(sizes) == 1


def test_a_long_row_is_a_batch_of_its_own():
    """Stops an endless loop or a dropped row when one row exceeds the budget."""
    rows = [Row([1] * n, [0] * n) for n in (3, 50, 3, 3)]
    assert micro_batches(rows, 9) == [[1], [0, 2, 3]]


def test_prefix_packs_share_what_can_be_shared():
    """Stops packs that are correct but share nothing: 8 rows with 100 common tokens need 580 nodes."""
    rows = [Row(list(range(100)) + [1000 + 100 * r + t for t in range(60)], [0] * 160) for r in range(8)]
    assert prefix_packs(rows, 10_000) == [(list(range(8)), 580)]
    assert len(prefix_packs(rows, 300)) == 2
    assert len(prefix_packs([Row([7] * 9 + [r] * 30, [0] * 39) for r in range(3)])) == 3  # too little in common


@pytest.mark.parametrize("share", [False, True])
def test_micro_batches_do_not_change_the_gradient(share):
    """Stops the mean of means: the sum over micro-batches with one global divisor must be the gradient of one batch."""
    model, rows = tiny("qwen2"), sharing_rows() + some_rows(3)
    divisor = sum(sum(row.mask) for row in rows)
    whole = gradients(model, -row_logps(model, rows)[0].sum() / divisor)
    model.zero_grad()
    for batch in micro_batches(rows, 64, share_prefix=share, pack_tok=60):
        (-row_logps(model, [rows[i] for i in batch], share_prefix=share, pack_tok=60)[0].sum() / divisor).backward()
    parts = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


def test_rows_without_trained_tokens_still_run_backward():
    """Stops a rank whose rows train nothing from leaving the others waiting in the backward."""
    model = tiny("llama")
    for rows in ([Row([1, 2, 3], [0, 0, 0])], []):
        logp_N, entropy_N, _ = row_logps(model, rows)
        assert logp_N.shape == entropy_N.shape == (0,)
        assert gradients(model, logp_N.sum()).abs().sum() == 0


def test_malformed_rows_are_refused():
    """Stops a trained first token, whose 'position before' would be the end of the row above."""
    for row in (Row([1, 2], [1, 0]), Row([1, 2], [0]), Row([], [])):
        with pytest.raises(ValueError, match="row 0 has"):
            row_logps(tiny("llama"), [row])


def test_clip_grad_norm():
    """Stops clipping per tensor instead of over all, and a step taken on nan."""
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0])
    assert clip_grad_norm(iter(parameters), 10.0) == pytest.approx(5.0) and parameters[0].grad[0] == 3.0
    assert clip_grad_norm(parameters, 1.0) == pytest.approx(5.0)
    assert parameters[0].grad[0].item() == pytest.approx(0.6, abs=1e-5) and parameters[1].grad[1].item() == pytest.approx(0.8, abs=1e-5)
    parameters[0].grad[0] = float("nan")
    with pytest.raises(FloatingPointError):
        clip_grad_norm(parameters, 1.0)
    assert parameters[1].grad[1].item() == pytest.approx(0.8, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------- load, save, reference


def test_create_tiny_is_deterministic():
    """Stops runs that differ because another part of the program drew random numbers first."""
    tokenizer = build_tokenizer(TEXTS)
    state = torch.get_rng_state()
    a = create_tiny(tokenizer, "tiny", seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(5)
    b, c = create_tiny(tokenizer, "tiny", seed=3), create_tiny(tokenizer, "tiny", seed=4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert 170_000 < sum(p.numel() for p in a.parameters()) - 64 * len(tokenizer) < 190_000
    with pytest.raises(ValueError, match="unknown model size"):
        create_tiny(tokenizer, "huge")


def saved(folder, kind="llama"):
    tokenizer = build_tokenizer(TEXTS)
    model = tiny(kind, vocab=len(tokenizer))
    save_model(model, tokenizer, folder)
    return model, tokenizer


def test_full_weights_survive_saving(tmp_path):
    """Stops checkpoints that lose weights (tied ones first of all)."""
    model, tokenizer = saved(tmp_path / "m")
    loaded, loaded_tokenizer = load_model(str(tmp_path / "m"))
    check_tokenizer(tokenizer, loaded_tokenizer)
    torch.testing.assert_close(row_logps(loaded, some_rows())[0], row_logps(model, some_rows())[0])


def test_adapters_survive_saving(tmp_path):
    """Stops adapters that come back empty, frozen or without their base."""
    saved(tmp_path / "m", "qwen3")
    model, tokenizer = load_model(str(tmp_path / "m"), lora_rank=4)
    before = row_logps(model, some_rows())[0].detach()
    trained(model)
    make_reference(model)
    save_model(model, tokenizer, tmp_path / "a")
    loaded, _ = load_model(str(tmp_path / "a"))
    torch.testing.assert_close(row_logps(loaded, some_rows())[0], row_logps(model, some_rows())[0])
    assert not torch.allclose(row_logps(loaded, some_rows())[0], before)
    assert trainable_parameters(loaded) and all("lora" in name for name, p in loaded.named_parameters() if p.requires_grad)
    assert not any("reference" in name for name, _ in loaded.named_parameters())
    with pytest.raises(ValueError, match="lora_rank is 8"):
        load_model(str(tmp_path / "a"), lora_rank=8)


def test_load_errors_say_what_to_do(tmp_path, monkeypatch):
    """Stops a stack trace from deep inside a library where a path was misspelt."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a model folder nor a hub name"):
        load_model("nobody/no-such-model")
    with pytest.raises(ValueError, match="neither a model folder nor a hub name"):
        load_model(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="holds neither config.json"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match="quantize is 'int3'"):
        load_model(str(tmp_path), quantize="int3")


def trained(model, steps=2, lr=1e-2):
    """A few steps towards some rows; returns the losses."""
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -row_logps(model, some_rows(5))[0].mean()
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_nf4_with_adapters_learns(tmp_path):
    """Stops 4-bit loading that freezes everything, and the gradient of an eval-mode model from being wrong (bitsandbytes repacks weights there)."""
    saved(tmp_path / "m")
    found = []
    for recompute, mode in ((False, True), (False, False), (True, True)):
        model, _ = load_model(str(tmp_path / "m"), quantize="nf4", lora_rank=4, gradient_checkpointing=recompute)
        assert any("4bit" in type(module).__name__ for module in model.modules())
        model.train(mode)
        with torch.no_grad():
            row_logps(model, some_rows())
        found.append(gradients(model, row_logps(model, some_rows())[0].sum()))
        torch.testing.assert_close(found[-1], found[0])
        losses = trained(model, steps=3)
        assert losses[-1] < losses[0]


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path):
    """Stops recomputation that is silently off, or that turns dropout on and changes the numbers."""
    saved(tmp_path / "m", "qwen2")
    results = []
    for flag in (False, True):
        model, _ = load_model(str(tmp_path / "m"), gradient_checkpointing=flag)
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        results.append(gradients(model, row_logps(model, some_rows())[0].sum()))
        assert len(calls) == (2 if flag else 1)
    torch.testing.assert_close(results[0], results[1])


def test_16_bit_weights_are_not_trained(tmp_path):
    """Stops a learning rate of 1e-6 from rounding to nothing in bfloat16."""
    saved(tmp_path / "m")
    model, _ = load_model(str(tmp_path / "m"), dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype='float32'"):
        trainable_parameters(model)
    assert trainable_parameters(load_model(str(tmp_path / "m"), dtype="bfloat16", lora_rank=2)[0])[0].dtype == torch.float32


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_reference_stays_the_initial_model(tmp_path, lora_rank):
    """Stops a reference that shares weights with the policy, and a LoRA reference that switches training off."""
    saved(tmp_path / "m")
    rows = sharing_rows()
    if lora_rank:  # adapters that are no longer zero: the base model alone would be the wrong reference
        start, tokenizer = load_model(str(tmp_path / "m"), lora_rank=lora_rank)
        trained(start)
        save_model(start, tokenizer, tmp_path / "a")
    model, _ = load_model(str(tmp_path / ("a" if lora_rank else "m")))
    initial_N = row_logps(model, rows)[0].detach()
    reference = make_reference(model)
    torch.testing.assert_close(reference_logps(model, reference, rows), initial_N)
    trainable = len(trainable_parameters(model))
    trained(model, steps=3)
    torch.testing.assert_close(reference_logps(model, reference, rows), initial_N)
    torch.testing.assert_close(reference_logps(model, reference, rows, share_prefix=True), initial_N, atol=1e-4, rtol=1e-4)
    assert len(trainable_parameters(model)) == trainable
    assert not torch.allclose(row_logps(model, rows)[0], initial_N)


# ---------------------------------------------------------------------------------------------------------------- two ranks


def step(model, rows, divisor, world=1):
    """One SGD step on the rows' summed loss over the global divisor; FSDP averages over ranks, hence `world`."""
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.5)
    loss = -row_logps(model, rows)[0].sum() / divisor
    (loss * world).backward()
    norm = clip_grad_norm(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm


def two_ranks(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rows = some_rows()
    divisor = sum(sum(row.mask) for row in rows)
    for kind in ("full", "lora"):
        model, tokenizer = load_model(f"{folder}/m", lora_rank=4 * (kind == "lora"))
        reference = make_reference(model)
        model, reference = shard(model), shard(reference)
        initial_N = reference_logps(model, reference, rows)
        loss, norm = step(model, rows[rank::2], divisor, world=2)
        torch.distributed.all_reduce(loss)
        torch.testing.assert_close(reference_logps(model, reference, rows), initial_N)
        with gathered(model), torch.no_grad():
            for _ in range(rank + 1):  # unequal numbers of forwards must not hang
                inside_N = row_logps(model, rows)[0]
        torch.testing.assert_close(inside_N, row_logps(model, rows)[0].detach())
        save_model(model, tokenizer, f"{folder}/two_{kind}")
        if rank == 0:
            torch.save({"loss": loss, "norm": norm, "logp_N": inside_N}, f"{folder}/{kind}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path):
    """Stops wrong gradient averaging, a stale unsharded copy, and checkpoints that hold one rank's shard."""
    saved(tmp_path / "m")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(two_ranks, args=(port, str(tmp_path)), nprocs=2)
    rows = some_rows()
    for kind in ("full", "lora"):
        model, _ = load_model(str(tmp_path / "m"), lora_rank=4 * (kind == "lora"))
        loss, norm = step(model, rows, sum(sum(row.mask) for row in rows))
        theirs = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        torch.testing.assert_close(theirs["loss"], loss)
        assert theirs["norm"] == pytest.approx(norm, rel=1e-4)
        torch.testing.assert_close(theirs["logp_N"], row_logps(model, rows)[0].detach(), atol=1e-4, rtol=1e-4)
        loaded, _ = load_model(str(tmp_path / f"two_{kind}"))
        for (name, ours), (other, saved_weight) in zip(model.named_parameters(), loaded.named_parameters()):
            assert name == other
            torch.testing.assert_close(saved_weight, ours, atol=1e-5, rtol=1e-4, msg=name)


def test_numbered_names_are_one_token():
    # Stops names that are compared word by word, and names not seen before that do not come back exactly.
    tokenizer = build_tokenizer(["take mug 1 from drawer 3", "at drawer 3: mug 1, pen 2", "pen 2", "mug 12"], "numbered")
    tokens = lambda text: tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokens("take mug 1 from drawer 3") == ["▁take", "▁mug▁1", "▁from", "▁drawer▁3"]
    assert tokens("at drawer 3: mug 1, pen 2\nmug 12")[1:] == [*"▁drawer▁3 : ▁mug▁1 , ▁pen▁2".split(), "\n", "▁mug▁12"]
    for text in ("go to drawer 12", "go to pen 1", "pen 3; mug 77", "mug 1 2", "mug", "7"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokens("pen 12") == ["▁pen", "▁12"]


def test_pages_are_made_of_words():
    # Stops an address, a price or a quoted name never seen before from being spelled letter by letter, and one that does not come back exactly.
    seen = ["url: shopping/product/blue-lamp\n[1] link 'Blue Lamp'\n[2] text 'price $12.99, sold 2024-05-29'", "url: map/place/red-hat", "text '$3.50'", "555-1234"]
    tokenizer = build_tokenizer(seen, "pages")
    tokens = lambda text: tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokens("url: map/product/red-lamp\n") == ["▁url", ":", "▁map", "/product", "/red", "-lamp", "\n"]
    assert tokens("[1] link 'Blue Lamp'\n[2] text '$3.99'") == ["▁[▁1]", "▁link▁'", "▁Blue", "▁Lamp", "'\n", "▁[▁2]", "▁text▁'", "▁$3", ".99", "'"]
    assert tokens("sold 2024-05-29") == ["▁sold", "▁2024", "-05", "-29"]
    # A number that is said or typed has the token that it has on a page, not that of a line's number: else a policy cannot copy it
    numbers = build_tokenizer(["stop [33]\n[33] link 'x'\ntext 'sold 33'\nclick [33]\ntype [4] [33] [0]\n33"], "pages")
    said = lambda text: numbers.convert_ids_to_tokens(numbers(text, add_special_tokens=False)["input_ids"])
    assert said("stop [33]") == ["▁stop", "▁[", "▁33", "]"] and said("type [4] [33] [0]")[1:5] == ["▁[▁4]", "▁[", "▁33", "]"]
    assert said("click [33]") == ["▁click", "▁[▁33]"] and said("text 'sold 33'")[2] == "▁33"
    for text in (*seen, "a / b - c", "//", "-x", "1.234.56", "it's 'q'\n'x", "/", "https://a.b-c/d.99?q=a+b", "'\n'\n"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
