import itertools
import json
import lzma
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import evaluate
import metrics
from data import BadInput
from model import DECODER, Model, ModelConfig, Packed, save

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Everything here is small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model, tokenizer, spec, langs=None, split="test", tasks=None, limit=1000, **more):
    return evaluate.run(evaluate.Subject(model, tokenizer, spec, langs, split, limit, **more), tasks)


# ---- embed


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["the cat sees seven dogs", "die Katze sieht sieben Hunde"], 300)


def tiny(pool="cls", causal=False, dropout=.1):
    torch.manual_seed(1)
    return Model(ModelConfig(vocab=300, width=32, layers=2, heads=2, hidden=64, max_length=48, pool=pool, causal=causal,
                             dropout=dropout))


TEXTS = ["the cat", "", "seven dogs see the cat and the cat sees seven dogs", "dogs", "the cat", "die Katze sieht sieben Hunde"]


@pytest.mark.parametrize("pool, causal", [("cls", False), ("mean", False), ("last", True)])
def test_a_text_has_one_vector_whatever_it_is_embedded_with(tokenizer, pool, causal):
    model = tiny(pool, causal).eval()
    together = evaluate.embed(model, tokenizer, TEXTS)
    alone = torch.cat([evaluate.embed(model, tokenizer, [text]) for text in TEXTS])
    assert together.shape == (6, 32) and together.dtype == torch.float32
    assert torch.allclose(together, alone, atol=1e-5) and not torch.allclose(together[0], together[3], atol=1e-3)
    assert torch.allclose(together, evaluate.embed(model, tokenizer, TEXTS, tokens_per_batch=20), atol=1e-5)
    assert torch.allclose(together.flip(0), evaluate.embed(model, tokenizer, TEXTS[::-1]), atol=1e-5)


def test_embedding_no_text_gives_no_vector(tokenizer):
    assert evaluate.embed(tiny(), tokenizer, []).shape == (0, 32)


def test_embedding_leaves_no_trace(tokenizer):
    model = tiny().train()
    model.blocks[0].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    first = evaluate.embed(model, tokenizer, TEXTS)
    assert torch.equal(first, evaluate.embed(model, tokenizer, TEXTS))   # no dropout
    assert modes == [module.training for module in model.modules()] and torch.equal(state, torch.get_rng_state())
    assert not first.requires_grad


def test_texts_that_are_cut_are_counted(tokenizer, capsys):
    long = "the cat sees seven dogs " * 50
    vectors = evaluate.embed(tiny().eval(), tokenizer, [long, long + " and more", "dogs"])
    assert "2 of 3 texts are longer than 48 tokens" in capsys.readouterr().err and torch.equal(vectors[0], vectors[1])
    evaluate.embed(tiny(), tokenizer, ["dogs"], max_length=4)
    assert "4 tokens" in capsys.readouterr().err


# ---- generate


SHAPES = {
    "learned": dict(position_offset=2, head="transform"),
    "sinusoidal": dict(positions="sinusoidal", head="bias"),
    "llama": dict(positions="rotary", norm="rmsnorm", norm_place="pre", activation="swiglu", bias=False, kv_heads=2),
    "rotary post": dict(positions="rotary", kv_heads=1),
    "learned pre": dict(norm_place="pre"),
    "qwen": dict(DECODER, head_size=6, qk_norm="head", qkv_bias=True, kv_heads=2, stretch=(8.0, 1.0, 4.0, 12)),
    "olmo2": dict(DECODER, norm_place="branch", qk_norm="whole"),
    "gemma2": dict(DECODER, norm_place="both", activation="geglu", embed_scale=5.0, score_cap=5.0, logit_cap=3.0, kv_heads=2),
    "openelm": dict(DECODER, head_size=8, shapes=((2, 1, 24), (6, 3, 40)), qk_norm="head"),
}


def writer(shape, dropout=.1):
    """A random causal model whose next token depends on all of the prompt."""
    torch.manual_seed(4)
    model = Model(ModelConfig(vocab=40, width=32, layers=2, heads=4, hidden=64, max_length=24, causal=True, tied=False,
                              dropout=dropout, **SHAPES[shape])).double()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data *= 3
    return model


def plain_generate(model, prompt, stop, max_new):
    row = list(prompt)
    for _ in range(max_new):
        if len(row) == model.config.max_length:
            break
        token = int(model.logits(model(Packed.of([row], causal=True))[-1:]).argmax())
        if token == stop:
            return row[len(prompt):], True
        row.append(token)
    return row[len(prompt):], False


@pytest.mark.parametrize("shape", SHAPES)
def test_generating_is_greedy_decoding_by_whole_forwards_for_prompts_of_any_length(shape):
    model, rng = writer(shape).eval(), np.random.default_rng(0)
    prompts = [rng.integers(40, size=length).tolist() for length in (1, 5, 2, 20, 9, 9, 24, 13, 23, 3, 6, 11)]
    free, _ = evaluate.generate(model, prompts, -1, 9)
    assert free == [plain_generate(model, prompt, -1, 9)[0] for prompt in prompts] and len({*map(tuple, free)}) > 8
    stop = max(range(40), key=lambda token: sum(token in answer[2:6] for answer in free))
    wanted = [plain_generate(model, prompt, stop, 9) for prompt in prompts]
    assert 1 < sum(stopped for _, stopped in wanted) < 11
    assert wanted[6] == ([], False) and len(wanted[3][0]) <= 4           # no room; little room
    for tokens_per_batch in (1, 40, 100, 10_000):
        found = evaluate.generate(model, prompts, stop, 9, tokens_per_batch)
        assert list(zip(*found)) == wanted
    backwards = evaluate.generate(model, prompts[::-1], stop, 9)
    assert list(zip(*backwards))[::-1] == wanted


def test_generating_leaves_no_trace_and_takes_no_impossible_prompt():
    model = writer("llama", dropout=.5).train()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    first = evaluate.generate(model, [[1, 2], [3]], 0, 5)
    assert first == evaluate.generate(model, [[1, 2], [3]], 0, 5)        # no dropout
    assert modes == [module.training for module in model.modules()] and torch.equal(state, torch.get_rng_state())
    assert evaluate.generate(model, [], 0, 5) == ([], []) and evaluate.generate(model, [[1]], 0, 0) == ([[]], [False])
    for prompt in ([], [1] * 25):
        with pytest.raises(ValueError, match=f"a prompt has {len(prompt)} tokens: it must have 1 to 24"):
            evaluate.generate(model, [[1], prompt], 0, 5)
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        evaluate.generate(model, [[1]], 0, 5)


@pytest.mark.parametrize("generated, gold, exact, begins", [
    ("(.*)(dog)", "(.*)(dog)", True, True),
    ("  (.*)(dog)\n", "(.*)(dog) ", True, True),                         # space around does not count
    ("(.*)( dog)", "(.*)(dog)", False, False),                           # space inside does
    ("(.*)(dog)(.*)", "(.*)(dog)", False, True),                         # trailing text
    ("(.*)(dog) and more", "(.*)(dog)", False, True),
    ("(.*)(do", "(.*)(dog)", False, False),                              # cut short
    ("(.*)(DOG)", "(.*)(dog)", False, False),                            # case counts
    ("say (.*)(dog)", "(.*)(dog)", False, False),
    ("1,000", "1000", False, False),                                     # no number is normalised
    ("", "(.*)(dog)", False, False),                                     # nothing generated is always wrong
    (" \n", "(.*)(dog)", False, False),
    ("", "", False, False), (" ", "", False, False), ("", " ", False, False),
    ("anything", "", False, False),                                      # and does not begin with nothing
])
def test_which_answers_count_as_right(generated, gold, exact, begins):
    assert (evaluate.exact(generated, gold), evaluate.starts_with(generated, gold)) == (exact, begins)


# ---- tasks


@pytest.fixture(scope="module")
def run_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "run"
    folder.mkdir()
    save(tiny(), folder / "model.pt")
    data.write_tokenizer(tokenizer, folder / "tokenizer.json")
    config = {"objective": "mexma", "data": "toy", "langs": "en,de,ru", "eval_data": "", "seed": 0}
    (folder / "log.jsonl").write_text(json.dumps({"config": config}) + "\n{}\n")
    return folder


def test_run_names_every_metric_and_averages_over_the_languages(tokenizer):
    found = run(tiny().eval(), tokenizer, "toy", ["en", "de", "ru"], limit=30)
    assert found["retrieval/rows"] == found["geometry/rows"] == 30
    for metric in ("retrieval/xsim", "retrieval/xsim++"):
        assert found[metric] == pytest.approx((found[f"{metric}/de-en"] + found[f"{metric}/ru-en"]) / 2)
    types = [name for name in found if name.startswith("retrieval/xsim++/") and "-" not in name]
    assert {"retrieval/xsim++/negation", "retrieval/xsim++/misaligned"} <= set(types)
    assert sum(found[name] for name in types) == pytest.approx(found["retrieval/xsim++"])
    assert {"retrieval/top1/en-de", "retrieval/top1/de-en", "retrieval/xsim_distance", "retrieval/xsim_absolute"} <= set(found)
    assert {"geometry/rankme", "geometry/uniformity", "geometry/cosine/same", "geometry/cosine/translations/ru-en"} <= set(found)
    assert all(math.isfinite(value) for value in found.values())
    assert len(evaluate.table(found).splitlines()) < len(found)


def test_hard_negatives_differ_from_their_row_and_rows_are_aligned():
    texts, hard = evaluate.test_rows("toy", ["en", "de"], "test", 20)
    assert [len(column) for column in texts.values()] == [20, 20] and len(hard) > 20
    assert all(text != texts["en"][row] for text, row, _ in hard)


def test_one_language_has_geometry_only(tokenizer, tmp_path):
    (tmp_path / "plain.txt").write_text("".join(f"the cat sees {count} dogs\n" for count in range(30)))
    found = run(tiny().eval(), tokenizer, str(tmp_path / "plain.txt"), split="all")
    assert found["geometry/rows"] == 30 and not any(name.startswith("retrieval") for name in found)
    with pytest.raises(BadInput, match="one text a row"):
        run(tiny(), tokenizer, str(tmp_path / "plain.txt"), split="all", tasks=["retrieval"])


def test_rows_or_vectors_that_cannot_be_evaluated_are_bad_input(tokenizer, tmp_path):
    with pytest.raises(BadInput, match="limit 1 is too low"):
        run(tiny(), tokenizer, "toy", limit=1)
    (tmp_path / "one.txt").write_text("the cat\n")
    with pytest.raises(BadInput, match="has 1 rows"):
        run(tiny(), tokenizer, str(tmp_path / "one.txt"), split="all")
    model = tiny()
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        run(model, tokenizer, "toy", limit=3)


def scripted(monkeypatch, tokenizer, said):
    """Whatever the model is, it answers `said`: (text, stopped) for each prompt in turn."""
    asked = []

    def generate(model, prompts, stop, max_new, progress=False):
        asked.append((prompts, stop, max_new))
        ids = [data.encode(tokenizer, [text])[0].tolist() for text, _ in said]
        return ids[:len(prompts)], [stopped for _, stopped in said][:len(prompts)]

    monkeypatch.setattr(evaluate, "generate", generate)
    return asked


def test_the_scores_of_known_answers(tokenizer, monkeypatch):
    prompts, golds = ["the cat", "seven dogs", "the cat sees", "dogs " * 100], ["Katze", "Hunde", "Katze sieht", "sieben"]
    said = [("Katze", True), ("Hunde sieben", False), ("Katze sieht", False), ("", True)]
    asked = scripted(monkeypatch, tokenizer, said)
    score = lambda *known: evaluate.graded(answers, evaluate.JUDGES["generate"](answers, None)[0], *known)
    answers = evaluate.answer(tiny(causal=True), tokenizer, prompts, golds)
    found = score({"seven dogs", "Katze", "the cat"})
    assert found == {"exact": 50, "startswith": 75, "stop": 50, "truncated": 50, "prompts_cut": 25, "rows": 4,
                     "exact_new_prompt": 50, "rows_new_prompt": 2, "exact_unseen": pytest.approx(100 / 3), "rows_unseen": 3}
    rows, stop, max_new = asked[0]
    assert max_new == 2 * max(len(ids) for ids in data.encode(tokenizer, golds)) + 8
    assert rows[0] == [2, *data.encode(tokenizer, ["the cat"])[0], 3] and stop == 3
    assert len(rows[3]) == max(24, 48 - max_new) and rows[3][-1] == 3    # cut, with room for an answer
    found = score({*prompts, *golds})
    assert found["rows_unseen"] == 0 and "exact_unseen" not in found     # a share of no rows is no number
    assert "rows_unseen" not in score()


def test_a_causal_model_is_asked_when_there_are_two_columns(tokenizer, tmp_path):
    model = tiny("last", causal=True)
    found = run(model, tokenizer, "regex", limit=12, answer_limit=7)
    assert found["generate/rows"] == 7 and found["retrieval/rows"] == found["geometry/rows"] == 12
    assert found["generate/stop"] + found["generate/truncated"] == 100 and "generate/rows 7" in " ".join(evaluate.table(found).split())
    assert set(run(model, tokenizer, "regex", tasks=["generate"], limit=2)) == {n for n in found if n.startswith("gen")}
    assert not any(name.startswith("generate") for name in run(tiny(), tokenizer, "regex", limit=9))
    assert not any(name.startswith("generate") for name in run(model, tokenizer, "toy", limit=9))
    with pytest.raises(BadInput, match="needs a causal model"):
        run(tiny(), tokenizer, "regex", tasks=["generate"])
    with pytest.raises(BadInput, match="choose two with --langs"):
        run(model, tokenizer, "toy", tasks=["generate"], limit=9)


def test_translations_show_what_was_found(tokenizer):
    texts, _ = evaluate.test_rows("toy", ["en", "de", "fr"], "test", 12)
    examples = evaluate.examples(tiny().eval(), tokenizer, texts)
    assert len(examples) == 5 and examples[0].query == texts["de"][0] and examples[1].query in texts["fr"]
    assert all(one.right == (one.found == one.gold) and one.gold in texts["en"] for one in examples)
    same = evaluate.examples(tiny().eval(), tokenizer, {"en": texts["en"], "copy": texts["en"]}, n=12)
    assert all(one.right for one in same)
    assert evaluate.examples(tiny(), tokenizer, {"en": texts["en"]}) == []


def test_examples_of_a_causal_model_are_its_answers(tokenizer, monkeypatch):
    texts = {"user": [f"{count} dogs" for count in range(7)], "assistant": [f"{count} cats" for count in range(7)]}
    asked = scripted(monkeypatch, tokenizer, [(text, True) for text in ("0 cats", "a cat", "2 cats ", "", "5 cats")])
    found = evaluate.examples(tiny(causal=True).eval(), tokenizer, texts)
    assert [(one.query, one.gold, one.right) for one in found] == [(f"{row} dogs", f"{row} cats", row in (0, 2, 5)) for row in (0, 1, 2, 4, 5)] and asked


# ---- retrieval in many languages, and tasks with files of their own


def test_the_matrix_and_buccs_f1_are_averaged_over_languages(tokenizer):
    texts = evaluate.test_rows("toy", ["en", "de", "ru"], limit=25)[0]
    vectors = {name: evaluate.embed(tiny(), tokenizer, lines) for name, lines in texts.items()}
    found = run(tiny(), tokenizer, "toy", ["en", "de", "ru"], limit=25, tasks=["matrix", "bucc"])
    pairs = list(itertools.permutations(texts, 2))
    for a, b in pairs:
        assert found[f"matrix/xsim/{a}-{b}"] == pytest.approx(metrics.xsim(vectors[a], vectors[b], texts=texts[b]))
    assert found["matrix/xsim/into/en"] == pytest.approx((found["matrix/xsim/de-en"] + found["matrix/xsim/ru-en"]) / 2)
    assert found["matrix/xsim"] == pytest.approx(np.mean([found[f"matrix/xsim/{a}-{b}"] for a, b in pairs]))
    assert found["bucc/f1/en-de"] == pytest.approx(metrics.bucc_f1(vectors["en"], vectors["de"]))
    assert found["bucc/f1"] == pytest.approx((found["bucc/f1/de-en"] + found["bucc/f1/ru-en"]) / 2)
    assert found["matrix/rows"] == found["bucc/rows"] == 25 and "matrix/xsim/into/en" in evaluate.table(found)


def test_the_table_of_sixty_languages_can_be_read():
    names = [f"l{place:02}_Latn" for place in range(60)]
    results = {"matrix/rows": 9, "matrix/xsim": 5.0} | {f"matrix/xsim/{a}-{b}": 1.0 for a, b in itertools.permutations(names, 2)}
    results |= {f"matrix/xsim/into/{a}": 1.0 for a in names} | {"retrieval/xsim++": 3.0, "retrieval/xsim++/number": 1.0}
    results |= {f"retrieval/xsim++/{a}-{names[0]}": 1.0 for a in names[:10]}
    lines = evaluate.table(results).splitlines()
    assert len(lines) == 2 + 2 + 10 + 1 and lines[-1] == f"and {60 * 59 + 60} numbers of single languages and pairs, which are in the file"
    assert "every language searched in every other" in lines[1] and "retrieval/xsim++/number" in lines[3]


WORDS = [f"the cat {verb} {count} {noun}" for verb in ("sees", "hears") for count in ("one", "two", "seven") for noun in ("dogs", "cats")]


@pytest.fixture()
def flores(tmp_path):
    """Twelve rows in three languages; the altered sentences of the English ones; their types."""
    folder = tmp_path / "devtest"
    folder.mkdir()
    for code, change in (("eng_Latn", str), ("deu_Latn", str.upper), ("abc_Latn", str.title)):
        (folder / f"{code}.devtest").write_text("".join(f"{change(text)}\n" for text in WORDS), encoding="utf-8")
    altered = {text.replace("cat ", "dog "): {"src": text, "errtype": "entity"} for text in WORDS}
    altered |= {text.replace("seven", "nine"): {"src": text, "errtype": "number"} for text in WORDS if "seven" in text}
    (folder / "eng_Latn_augmented.devtest").write_text("".join(f"{text}\n" for text in altered), encoding="utf-8")
    (tmp_path / "types.json").write_text(json.dumps(altered), encoding="utf-8")
    return folder


def test_a_folder_of_flores_files_is_read_whole_with_english_first(flores, tokenizer, run_folder, capsys):
    texts, hard = evaluate.test_rows(str(flores), split="all", limit=None)
    assert list(texts) == ["eng_Latn", "abc_Latn", "deu_Latn"] and texts["deu_Latn"] == [text.upper() for text in WORDS] and not hard
    assert list(evaluate.test_rows(str(flores), ["deu_Latn", "eng_Latn"], "all", 5)[0].items()) == [
        ("deu_Latn", texts["deu_Latn"][:5]), ("eng_Latn", WORDS[:5])]
    hard = ["--hard", str(flores / "eng_Latn_augmented.devtest"), "--hard-types", str(flores.parent / "types.json")]
    assert evaluate.main([str(run_folder), "--data", str(flores), *hard, "--tasks", "retrieval", "--json"]) == 0
    found, said = capsys.readouterr()
    found = json.loads(found)
    assert found == json.loads((run_folder / "eval-devtest-hard.json").read_text()) and found["retrieval/rows"] == 12 and not said
    assert found["retrieval/xsim++"] == pytest.approx(sum(found[f"retrieval/xsim++/{kind}"] for kind in ("entity", "number", "misaligned")))
    vectors = {name: evaluate.embed(tiny(), tokenizer, lines) for name, lines in texts.items()}
    assert found["retrieval/xsim/abc_Latn-eng_Latn"] == pytest.approx(metrics.xsim(vectors["abc_Latn"], vectors["eng_Latn"]))


def test_altered_sentences_know_their_rows_and_strangers_are_counted(flores, capsys):
    files = flores / "eng_Latn_augmented.devtest", flores.parent / "types.json"
    hard = evaluate.test_rows(str(flores), split="all", limit=None, hard=files)[1]
    assert len(hard) == 16 and all(WORDS[row] == text.replace("dog ", "cat ").replace("nine", "seven") for text, row, _ in hard)
    with open(files[0], "a", encoding="utf-8") as file:
        file.write("a line without a type\n")
    assert evaluate.test_rows(str(flores), split="all", limit=None, hard=files)[1] == [*hard, ("a line without a type", -1, "misaligned")]
    assert "1 of 17 altered sentences have no type" in capsys.readouterr().err
    with pytest.raises(BadInput, match="first language must be the altered one"):
        evaluate.test_rows(str(flores), ["deu_Latn", "eng_Latn"], "all", None, hard=files)
    files[1].write_text("[1]", encoding="utf-8")
    with pytest.raises(BadInput, match="not a JSON object"):
        evaluate.test_rows(str(flores), split="all", hard=files)


def test_a_flores_file_with_a_line_too_few_is_named(flores, tmp_path):
    (flores / "deu_Latn.devtest").write_text("eins\n", encoding="utf-8")
    with pytest.raises(BadInput, match="deu_Latn.devtest has 1 lines.*First extra line"):
        evaluate.test_rows(str(flores), split="all")
    with pytest.raises(BadInput, match="there is no .*/fra_Latn.devtest"):
        evaluate.test_rows(str(flores), ["eng_Latn", "fra_Latn"], "all")
    with pytest.raises(BadInput, match="must hold files CODE.devtest or CODE.dev"):
        evaluate.test_rows(str(tmp_path), split="all")


def test_tatoeba_reads_tables_and_lasers_pairs_of_files(tokenizer, tmp_path):
    texts = {"deu": [text.upper() for text in WORDS], "fra": [text.title() for text in WORDS]}
    with lzma.open(tmp_path / "deu-eng.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("deu\teng\n" + "".join(f"{a}\t{b}\n" for a, b in zip(texts["deu"], WORDS)))
    for name, lines in (("fra", texts["fra"]), ("eng", WORDS)):
        (tmp_path / f"tatoeba.fra-eng.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = run(tiny(), tokenizer, "toy", tasks=["tatoeba"], files=tmp_path)
    gold = evaluate.embed(tiny(), tokenizer, WORDS)
    for name, lines in texts.items():
        x = evaluate.embed(tiny(), tokenizer, lines)
        assert found[f"tatoeba/accuracy/{name}-eng"] == pytest.approx(metrics.top1(x, gold))
        assert found[f"tatoeba/accuracy/eng-{name}"] == pytest.approx(metrics.top1(gold, x))
    assert found["tatoeba/accuracy"] == pytest.approx((found["tatoeba/accuracy_into_eng"] + found["tatoeba/accuracy_from_eng"]) / 2)
    assert found["tatoeba/error"] == pytest.approx(100 - found["tatoeba/accuracy"]) and found["tatoeba/rows"] == 24 and "accuracy_into" in evaluate.table(found)
    (tmp_path / "tatoeba.fra-eng.eng").unlink()
    with pytest.raises(BadInput, match="fra-eng.eng is missing"):
        run(tiny(), tokenizer, "toy", tasks=["tatoeba"], files=tmp_path)


def test_pairs_of_texts_have_the_frames_of_the_columns(tokenizer):
    frames = [[[20], [3]], [[21, 22], [3]]]
    x, y = evaluate.Subject(tiny(), tokenizer, "toy", frames=frames).pair(["the cat", "dogs"], ["seven"])
    for vectors, texts, frame in ((x, ["the cat", "dogs"], frames[1]), (y, ["seven"], frames[0])):
        assert torch.allclose(vectors, evaluate.embed_rows(tiny(), evaluate.rows_of(tokenizer, texts, None, frame)), atol=1e-6)


def mining_files(folder, parts, change=str.upper):
    """Of the first eight sentences both sides have a translation, in another order; two more on each side have none."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        sides = {"de": [change(text) for text in WORDS[:10]], "en": [*WORDS[7::-1], *WORDS[10:]]}
        for name, lines in sides.items():
            (folder / f"de-en.{part}.{name}").write_text("".join(f"{name}-{row}\t{text}\n" for row, text in enumerate(lines)), encoding="utf-8")
        (folder / f"de-en.{part}.gold").write_text("".join(f"de-{row}\ten-{7 - row}\n" for row in range(8)), encoding="utf-8")


def test_mining_reads_buccs_folders_and_finds_what_is_the_same(tokenizer, tmp_path):
    mining_files(tmp_path / "bucc2018" / "a" / "de-en", ["sample"])
    mining_files(tmp_path / "bucc2018" / "b" / "de-en", ["training"], str)                     # the very same sentences
    found = run(tiny(), tokenizer, "toy", tasks=["mine"], files=tmp_path)
    x, y = (evaluate.embed(tiny(), tokenizer, lines) for lines in ([text.upper() for text in WORDS[:10]], [*WORDS[7::-1], *WORDS[10:]]))
    gold = {(row, 7 - row) for row in range(8)}
    sample, training = ((x, y, WORDS[:10], WORDS[:10], gold), (evaluate.embed(tiny(), tokenizer, WORDS[:10]), y, WORDS[:10], WORDS[:10], gold))
    assert {name: found[f"mine/{name}/de-en"] for name in ("f1", "precision", "recall", "f1_tune", "threshold")} == pytest.approx(
        metrics.bucc_mine(sample, training))
    assert found["mine/recall"] == 100 and found["mine/f1"] == found["mine/f1/de-en"] and found["mine/rows"] == 20
    assert "ratio margin" in evaluate.table(found)
    mining_files(tmp_path / "bucc2018" / "de-en", ["test"], str)         # with gold for the test part, the threshold is that of training
    same = run(tiny(), tokenizer, "toy", tasks=["mine"], files=tmp_path)
    assert same["mine/f1_tune"] == same["mine/f1"] > found["mine/f1_tune"]


def test_mining_says_what_is_missing_before_it_begins_and_which_line_is_wrong(tokenizer, tmp_path):
    mine = lambda: run(tiny(), tokenizer, "toy", tasks=["mine"], files=tmp_path)
    with pytest.raises(BadInput, match="de-en.training.gold is missing. It belongs to bucc2018 .*python data.py download bucc2018"):
        mine()
    mining_files(tmp_path, ["sample", "training"])                       # also without a folder of that name
    (tmp_path / "de-en.sample.en").unlink()
    with pytest.raises(BadInput, match="de-en.sample.en is missing"):
        mine()
    mining_files(tmp_path, ["sample"])
    with open(tmp_path / "de-en.training.gold", "a", encoding="utf-8") as file:
        file.write("de-1\ten-99\n")
    with pytest.raises(BadInput, match="de-en.training.gold:9: .*en-99' is not two ids"):
        mine()
    (tmp_path / "de-en.training.de").write_text("no tab\n", encoding="utf-8")
    with pytest.raises(BadInput, match="de-en.training.de:1: 'no tab' is not id<TAB>sentence"):
        mine()


# ---- command line


def test_the_command_prints_a_table_and_writes_the_file(run_folder, capsys):
    assert evaluate.main([str(run_folder), "--limit", "20", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval/xsim " in shown and "lower" in shown and shown.splitlines()[-1].startswith("health: ")
    written = json.loads((run_folder / "eval.json").read_text())
    assert written["retrieval/rows"] == 20 and "retrieval/xsim/ru-en" in written and "retrieval/xsim/fr-en" not in written
    assert evaluate.main([str(run_folder), "--limit", "10", "--tasks", "geometry", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(name.split("/")[0] for name in printed) == {"geometry"}
    assert json.loads((run_folder / "eval.json").read_text()) == written | printed
    os.utime(run_folder / "eval.json", (1, 1))                           # older than the model: nothing in it holds any more
    assert evaluate.main([str(run_folder), "--limit", "10", "--tasks", "geometry", "--json"]) == 0
    assert json.loads((run_folder / "eval.json").read_text()) == json.loads(capsys.readouterr().out)


def test_other_data_goes_to_a_file_of_its_own(run_folder, tmp_path, capsys):
    rows = [f"the cat sees {count} dogs\tdie Katze sieht {count} Hunde" for count in range(12)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["en\tde", *rows]) + "\n")
    assert evaluate.main([str(run_folder), "--data", str(tmp_path / "pairs.tsv"), "--langs", "de,en", "--json"]) == 0
    written = json.loads((run_folder / "eval-pairs-de-en.json").read_text())
    assert written["retrieval/rows"] == 12 and "retrieval/xsim/en-de" in written
    assert written == json.loads(capsys.readouterr().out)


def test_the_command_knows_which_answers_were_in_the_training_data(tokenizer, tmp_path, capsys):
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_text("".join(f"say {count}\tanswer {count % 7}\n" for count in range(30)))
    test.write_text("".join(f"say {count}\tanswer {count % 9}\n" for count in range(36)))
    folder = tmp_path / "run"
    folder.mkdir()
    save(tiny("last", causal=True), folder / "model.pt")
    data.write_tokenizer(tokenizer, folder / "tokenizer.json")
    (folder / "log.jsonl").write_text(json.dumps({"config": {"data": str(train), "langs": "", "eval_data": str(test)}}) + "\n")
    assert evaluate.main([str(folder), "--tasks", "generate", "--device", "cpu"]) == 0
    written = json.loads((folder / "eval.json").read_text())
    assert [written[f"generate/rows{name}"] for name in ("", "_new_prompt", "_unseen")] == [36, 6, 8]
    assert "generate/rows_unseen" in capsys.readouterr().out
    train.unlink()
    assert evaluate.main([str(folder), "--tasks", "generate", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr()
    assert "generate/rows_unseen" not in json.loads(shown.out) and "left out: there is no file" in shown.err


def test_bad_input_is_one_line_and_status_2(run_folder, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: there is no run") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flags, message", [
    (["--tasks", "retreival"], "did you mean retrieval?"), (["--tasks", ""], "names nothing"), (["--langs", "en,xx"], "'xx'"), (["--split", "exam"], "'exam'"),
    (["--tasks", "generate"], "needs a causal model"), (["--device", "abacus"], "'abacus'"), (["--limit", "-1"], "-1"),
    (["--hard", "a.txt"], "go together"), (["--hard", "a.txt", "--hard-types", "b.json"], "--hard needs --data"),
    (["--tasks", "mine", "--files", "nowhere"], "nowhere"), (["--tasks", "sts", "--sets", ","], "--sets names nothing"),
    (["--tasks", "sts", "--limit", "2"], "--limit is for the tasks retrieval"), (["--max-new", "3", "--tasks", "sts"], "--max-new is for the tasks generate"),
    (["--tasks", "sts", "--probe-epochs", "3"], "--probe-epochs is for the tasks hybrid-probes"),
    (["--probe-epochs", "0", "--tasks", "hybrid-probes"], "at least 1"), (["--tasks", "knn", "--sets", "sst2,mrpc"], "none of the tasks knn has this set"),
    (["--tasks", "knn", "--task-langs", "de"], "--task-langs chooses languages of")])
def test_each_mistake_is_named(run_folder, capsys, flags, message):
    assert evaluate.main([str(run_folder), *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("error: ") and message in shown.err


def test_a_run_that_is_not_whole_says_what_is_missing(tmp_path, capsys):
    assert evaluate.main([str(tmp_path)]) == 2 and "has no model.pt" in capsys.readouterr().err
    save(tiny(), tmp_path / "model.pt")
    assert evaluate.main([str(tmp_path)]) == 2 and "log.jsonl" in capsys.readouterr().err


# ---- poolings and headers


def test_poolings_are_the_geometry_of_the_four_kinds_of_vectors():
    tokenizer = data.open_corpus("toy", count=60, vocab=400).tokenizer
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=400, width=16, layers=1, heads=2, hidden=32)).eval()
    results = run(model, tokenizer, "toy", ["en", "de"], "valid", ["poolings"], 30)
    texts = evaluate.test_rows("toy", ["en", "de"], "valid", 30)[0]
    assert len(results) == 1 + 4 * 9
    for pool in ("mean", "max", "weighted", "attention"):
        vectors = {name: evaluate.embed_rows(model, evaluate.rows_of(tokenizer, lines), pool=pool) for name, lines in texts.items()}
        for metric in ("uniformity", "effective_rank", "alignment", "rank_90"):
            assert results[f"poolings/{pool}/{metric}"] == pytest.approx(metrics.geometry(vectors)[metric], rel=1e-4)
    assert results["poolings/mean/uniformity"] == pytest.approx(results["poolings/weighted/uniformity"])
    assert results["poolings/max/uniformity"] != pytest.approx(results["poolings/mean/uniformity"], rel=1e-3)
    assert "poolings/max/rank_90" in evaluate.table(results)


GEOMETRY = ["linear", "spectrum", "tokens", "attention", "uniform"]


@pytest.mark.parametrize("causal", [False, True])
def test_the_geometry_tasks_are_the_metrics_of_the_rows(tokenizer, causal):
    model = tiny("last" if causal else "cls", causal).eval()
    subject = evaluate.Subject(model, tokenizer, "toy", ["en", "de", "ru"], "test", 30)
    found = evaluate.run(subject, GEOMETRY)
    assert all(math.isfinite(value) for value in found.values()) and len(evaluate.table(found).splitlines()) == len(found)
    assert found["linear/residual/de-en"] == pytest.approx(metrics.linear_map(subject.vectors["en"], subject.vectors["de"])["residual"])
    assert found["linear/singular_100"] == pytest.approx((found["linear/singular_100/de-en"] + found["linear/singular_100/ru-en"]) / 2)
    assert found["linear/rows_per_width"] == 30 / 32 and found["linear/residual_relative_unit"] < 1e-3 < found["linear/residual_held_out_unit"]
    assert found["spectrum/explained_1"] < found["spectrum/explained_2"] < found["spectrum/explained_10"] < found["spectrum/explained_50"] == 100
    for nearest in ("", "/nearest_5"):
        assert sum(found[f"tokens/{name}{nearest}"] for name in ("translation", "same_sentence", "same_language", "other")) == pytest.approx(100)
    assert found["tokens/rows_queries"] == 90 and 0 < found["attention/entropy"] <= found["attention/entropy_of_mean"] <= found["attention/entropy_uniform"]
    own = model.config.pool
    assert found[f"uniform/xsim/{own}"] == evaluate.retrieval(subject.vectors, subject.texts)["xsim"]
    assert found["uniform/top1/mean"] == evaluate.retrieval(subject.pooled("mean"), subject.texts)["top1"]
    assert found["uniform/change/xsim++/words"] == pytest.approx(
        100 * (found[f"uniform/xsim++/{own}"] - found["uniform/xsim++/words"]) / found[f"uniform/xsim++/{own}"])


def test_the_mean_of_the_words_leaves_special_tokens_out(tokenizer):
    subject = evaluate.Subject(tiny().eval(), tokenizer, "toy", ["en", "de"], "test", 10)
    rows = evaluate.rows_of(tokenizer, ["the cat sees", ""])
    states = subject.states(rows)
    assert torch.allclose(subject.words(rows), torch.stack([states[0][1:-1].mean(0), states[1].mean(0)]))


def test_a_text_that_comes_twice_is_asked_for_once(tokenizer, tmp_path):
    (tmp_path / "twice.tsv").write_text("en\tde\n" + "the cat sees dogs\tdie Katze\nseven dogs\tsieben Hunde\n" * 3)
    found = run(tiny().eval(), tokenizer, str(tmp_path / "twice.tsv"), ["en", "de"], "all", ["tokens"])
    assert found["tokens/rows"] == 2


def test_the_arrays_for_plots_are_written_beside_the_results(run_folder, tokenizer, capsys):
    assert evaluate.main([str(run_folder), "--limit", "20", "--tasks", "spectrum", "--langs", "en,de", "--arrays"]) == 0
    found = json.loads((run_folder / "arrays-en-de.json").read_text())
    assert set(found) == {"singular_values", "explained", "vectors", "cosines", "differences", "retrieval", "attention"}
    subject = evaluate.Subject(tiny().eval(), tokenizer, "toy", ["en", "de"], "test", 20)
    vectors, whole = found["vectors"], torch.cat(list(subject.vectors.values())).double()
    assert vectors["column"] == ["en"] * 20 + ["de"] * 20 and vectors["row"] == [*range(20)] * 2
    assert torch.allclose(torch.tensor(vectors["values"]).double(), whole, atol=1e-5)
    plane = torch.tensor(vectors["pca"], dtype=torch.float64)
    assert plane.square().sum(0).sqrt().tolist() == pytest.approx(found["singular_values"][:2], rel=1e-4) and plane.prod(1).sum() == pytest.approx(0, abs=1e-3)
    assert found["retrieval"]["xsim"][1][0] == pytest.approx(xsim_of(subject)) and sum(found["cosines"]["de-en"]["unrelated"]) == 20 * 19
    assert len(found["differences"]["de-en"]) == 20 and len(found["explained"]) == 32
    for name, row in subject.ids.items():
        example = found["attention"][name]["examples"][0]
        assert example["tokens"][0] == "[CLS]" and len(example["weights"]) == len(row[0]) and sum(example["weights"]) == pytest.approx(1, abs=1e-4)
    few = evaluate.arrays(evaluate.Subject(tiny().eval(), tokenizer, "toy", ["en"], "test", 20), most=5)
    assert set(few) == {"singular_values", "explained", "vectors", "attention"} and len(few["vectors"]["values"]) == 5


def xsim_of(subject):
    return evaluate.retrieval(subject.vectors, subject.texts)["xsim/de-en"]


def test_the_probe_gap_of_sets_and_of_rows_without_labels(tokenizer, tmp_path, run_folder, capsys):
    texts = ["the cat sees seven dogs", "seven dogs see", "die Katze sieht sieben Hunde", "sieben Hunde"]
    (tmp_path / "sst2_dev.tsv").write_text("label\tsentence\n" + "".join(f"{row % 2}\t{texts[row % 4]} {'dogs ' * (row % 3)}\n" for row in range(40)))
    (tmp_path / "stsb_multi_test.tsv").write_text("score\ts1_en\ts2_en\n" + "".join(f"{row % 6}\t{texts[row % 4]}\t{texts[row % 3]}\n" for row in range(40)))
    assert evaluate.main([str(run_folder), "--tasks", "gap", "--sets", "sst2,stsb", "--files", str(tmp_path), "--limit", "36", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gap/sst2/rows"] == found["gap/stsb/rows"] == 36 and len(found) == 2 * 2 + 5 * 15 + 5 * 13
    assert found["gap/sst2/max/gap"] == pytest.approx(found["gap/sst2/max/semantic"] - found["gap/sst2/max/token"])
    assert evaluate.table(found).count("\n") == len(found) - 1
    subject = evaluate.Subject(tiny().eval(), tokenizer, "toy", ["en", "de"], "test", 36, files=tmp_path, sentences=evaluate.Sentences(("stsb",)))
    mark, ids = data.special(tokenizer), [data.encode(tokenizer, texts[:1])[0].tolist(), data.encode(tokenizer, texts[1:2])[0].tolist()]
    assert subject.rows_of([texts[1]], [texts[0]]) == [[mark.cls, *ids[0], mark.sep, *ids[1], mark.sep]]
    rows = subject.rows_of([texts[row % 3] for row in range(36)], [texts[row % 4] for row in range(36)])
    bins, z = torch.tensor([row % 6 for row in range(36)]).clamp(max=4), subject.embed(rows, "mean")
    assert found["gap/stsb/mean/class_alignment_4"] == pytest.approx(metrics.class_alignment(z, bins, 4), rel=1e-4)
    plain = run(tiny().eval(), tokenizer, "toy", ["en", "de"], limit=36, tasks=["gap"])
    assert 0 <= plain["gap/en/cls/token"] <= 100 and not any("semantic" in name for name in plain)
    for flags, message in ((["--sets", "sst2"], "or name one of them with --tasks"), (["--tasks", "gap", "--sets", "sst3"], "did you mean"),
                           (["--tasks", "gap", "--sets", "sst2", "--limit", "4"], "set sst2 cannot be probed")):
        assert evaluate.main([str(run_folder), "--files", str(tmp_path), *flags]) == 2 and message in capsys.readouterr().err


def test_the_geometry_tasks_refuse_what_they_cannot_do(tokenizer, tmp_path):
    (tmp_path / "plain.txt").write_text("".join(f"the cat sees {count} dogs\n" for count in range(30)))
    for task in ("linear", "tokens", "uniform"):
        with pytest.raises(BadInput, match=f"{task}.*one text a row"):
            run(tiny(), tokenizer, str(tmp_path / "plain.txt"), split="all", tasks=[task])
    flat = Model(ModelConfig(vocab=300, width=32, layers=0, heads=2, max_length=48)).eval()
    with pytest.raises(BadInput, match="this model has none"):
        run(flat, tokenizer, "toy", tasks=["attention"])
    model = tiny()
    model.blocks[-1].qkv.weight.data.fill_(math.nan)
    for task in ("tokens", "attention"):
        with pytest.raises(BadInput, match="has diverged"):
            run(model, tokenizer, "toy", ["en", "de"], limit=3, tasks=[task])


def test_a_header_stands_before_the_text_of_its_row_and_before_the_prompt():
    tokenizer = data.open_corpus("toy", count=60, vocab=400).tokenizer
    mark = data.special(tokenizer)
    one, two = data.encode(tokenizer, ["the cat"])[0].tolist(), data.encode(tokenizer, ["be short"])[0].tolist()
    assert evaluate.rows_of(tokenizer, ["the cat"]) == [[mark.cls, *one, mark.sep]]
    assert evaluate.rows_of(tokenizer, ["the cat"], ["be short"]) == [[mark.cls, *two, mark.sep, *one, mark.sep]]
    assert evaluate.rows_of(tokenizer, ["the cat"], ["be short"], ([7], [8, 9])) == [[mark.cls, *two, mark.sep, 7, *one, 8, 9]]
    assert evaluate.rows_of(tokenizer, ["the cat"], None, ([7], [8, 9]), longest=4) == [[mark.cls, 7, 8, 9]]
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=400, width=16, layers=1, heads=2, hidden=32, causal=True, pool="last")).eval()
    plain, opened = (evaluate.embed_rows(model, evaluate.rows_of(tokenizer, ["the cat"], headers)) for headers in (None, ["be short"]))
    packed = Packed.of([[mark.cls, *two, mark.sep, *one, mark.sep]], causal=True)
    assert torch.allclose(opened, model(packed)[-1:], atol=1e-6) and not torch.allclose(plain, opened, atol=1e-3)
