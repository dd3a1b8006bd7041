"""Make the tiny models of this folder, with what transformers computes for them:

    python tests/golden/make.py                          # needs requirements-dev.txt

Each folder is what `save_pretrained` writes for a random model of a family, and expected.json: rows
of ids, the last hidden states and the logits. tests/test_interop.py reads them.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

HERE = Path(__file__).parent
SIZES = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
             initializer_range=0.3)
WORDS = "a b c d e dog cat runs sees the two red ##s ##ing . , hund ein".split()
TEXTS = ("the dog runs .", "two cats", "ein hund sees a red cat , the cat sees the dog")
SPECIALS = {
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "xlm-roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
}
BERT = dict(max_position_embeddings=20, layer_norm_eps=1e-12, **SIZES)
XLMR = dict(max_position_embeddings=22, layer_norm_eps=1e-5, type_vocab_size=1, **SIZES)
KINDS = {   # folder: class, config
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**BERT)),
    "roberta": (transformers.RobertaModel, transformers.RobertaConfig(**XLMR)),
    "xlm-roberta": (transformers.XLMRobertaForMaskedLM, transformers.XLMRobertaConfig(**XLMR)),
}


def make_tokenizer(specials):
    """WordPiece over a handful of words, whose rows are [CLS] text [SEP] in the family's names."""
    cls = next(name for name in specials if name in ("[CLS]", "<s>"))
    sep = next(name for name in specials if name in ("[SEP]", "</s>"))
    unknown = next(name for name in specials if name in ("[UNK]", "<unk>"))
    pieces = {piece: i for i, piece in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", special_tokens=[(cls, pieces[cls]), (sep, pieces[sep])])
    return tokenizer


def rounded(numbers):
    return [round(number, 6) for number in numbers]


def make(name, kind, config, folder, seed=0):
    """A random model of a class, saved, and what it computes for three rows."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(SPECIALS["bert" if name == "bert" else "xlm-roberta"])
    config.vocab_size = tokenizer.get_vocab_size()
    model = kind(config).eval()
    for parameter in model.parameters():  # biases and norms too: a lost one must show
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data == 1)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = [tokenizer.encode(text).ids for text in TEXTS]
    expected = {"rows": rows, "transformers": transformers.__version__, "hidden": [], "logits": []}
    with torch.no_grad():
        for row in rows:
            out = model(torch.tensor([row]), output_hidden_states=True)
            states = out.hidden_states[-1][0].tolist()
            expected["hidden"].append([rounded(state) for state in states])
            logits = rounded(out.logits[0, -1].tolist()) if hasattr(out, "logits") else None
            expected["logits"].append(logits)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name, (kind, config) in KINDS.items():
        make(name, kind, config, Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / name)
