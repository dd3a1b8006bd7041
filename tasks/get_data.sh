#!/usr/bin/env bash
# Download data sets into data/:  bash tasks/get_data.sh NAME ...
#
# NAME is one of these. A star: it needs `pip install datasets`.
#   glue *         research use; qqp: Quora's terms; mnli: OANC and others. GLUE keeps its test labels,
#                  so the validation rows are the test table, except for mrpc
#   xnli *         CC BY-NC 4.0; 15 languages
#   pawsx *        free with attribution; 7 languages
#   stsb *         STS benchmark, research use; 9 languages
#   sick *         CC BY-NC-SA 3.0
#   senteval       mr, cr, subj, mpqa, and SentEval's test rows of sst2, which replace GLUE's (so get
#                  glue first); research use
#   trec *         research use
#   ag-news *      not commercial
#   squad          SQuAD 1.1, CC BY-SA 4.0
#   mlqa           CC BY-SA 3.0
#   flores         FLORES-200 and xsim++, CC BY-SA 4.0. flores81.txt has MEXMA's 81 languages
#   bucc           BUCC 2018, German and English, the part with gold pairs; research use
#   gsm8k          MIT
#   hellaswag      training rows, MIT
#   llm-jepa       LLM-JEPA's files of NL-RX (synth, turk; MIT), Spider (CC BY-SA 4.0), NQ-Open (CC
#                  BY-SA 3.0), Rotten Tomatoes, Yelp and others. Spider's databases come from
#                  https://yale-lily.github.io/spider: unpack its folder database/ into data/
#   multi30k       captions in English, German, French and Czech, for training; CC BY-NC-SA 4.0
#   wikitext       WikiText-2, CC BY-SA 3.0
#   wikipedia *    10,000 articles of 20231101.en, CC BY-SA
#
# We have not fetched every address. A wrong one ends with an error, and leaves no file.
set -euo pipefail

GITHUB=https://raw.githubusercontent.com
META=https://dl.fbaipublicfiles.com
PAIR='text=sentence1 text2=sentence2'
NLI='text=premise text2=hypothesis label=label'
new=$(mktemp -d)  # files move to data/ when they are complete
trap 'rm -rf "$new"' EXIT

keep() { mv "$@" data/; }

# fetch URL [NAME]
fetch() {
    echo "$1"
    curl --fail --silent --show-error --location "$1" --output "$new/${2:-$(basename "$1")}"
}

# hub DATASET CONFIG SET SPLIT,SPLIT:OUR_SPLIT COLUMN=EXPRESSION ...
hub() {
    echo "$1"
    python3 - "$new" "$@" <<'PYTHON'
import json, sys
import datasets
folder, path, config, name, splits, *columns = sys.argv[1:]
columns = [column.split("=", 1) for column in columns]
for pair in splits.split(","):
    split, ours = pair.rsplit(":", 1) if ":" in pair else (pair, pair)
    rows = datasets.load_dataset(path, None if config == "-" else config, split=split)
    with open(f"{folder}/{name}_{ours}.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps({key: eval(code, {}, row) for key, code in columns}), file=file)
PYTHON
    keep "$new/$3"_*.jsonl
}

# convert FILE OUT EXPRESSION: the expression makes rows of `lines`, what the JSON in FILE contains
convert() {
    python3 - "$new/$1" "$new/$2" "$3" <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8") if line.strip()]
with open(sys.argv[2], "w", encoding="utf-8") as file:
    for row in eval(sys.argv[3], {"lines": lines}):
        print(json.dumps(row), file=file)
PYTHON
}

# languages FUNCTION SET LANGUAGE ...   runs FUNCTION LANGUAGE NAME; English has no suffix
languages() {
    for language in "${@:3}"; do
        if [ "$language" = en ]; then "$1" en "$2"; else "$1" "$language" "$2-$language"; fi
    done
}

glue() { hub nyu-mll/glue "$1" "$@"; }
get_glue() {
    for set in sst2 cola; do glue $set train,validation:test text=sentence label=label; done
    glue mrpc train,validation:valid,test $PAIR label=label
    glue qqp train,validation:test text=question1 text2=question2 label=label
    # In our qnli and rte, class 1 is entailment.
    glue qnli train,validation:test text=question text2=sentence label=1-label
    glue rte train,validation:test $PAIR label=1-label
    glue mnli train,validation_matched:test $NLI
    hub nyu-mll/glue mnli mnli-mm validation_mismatched:test $NLI
}

xnli() { hub facebook/xnli "$1" "$2" test $NLI; }
get_xnli() { languages xnli xnli ar bg de el en es fr hi ru sw th tr ur vi zh; }

pawsx() { hub google-research-datasets/paws-x "$1" "$2" test $PAIR label=label; }
get_pawsx() { languages pawsx pawsx de en es fr ja ko zh; }

stsb() { hub PhilipMay/stsb_multi_mt "$1" "$2" train,dev:valid,test $PAIR label=similarity_score; }
get_stsb() { languages stsb stsb de en es fr it nl pl pt ru zh; }

get_sick() { hub mteb/sickr-sts - sick test $PAIR label=score; }
get_trec() { hub CogComp/trec - trec train,test text=text label=coarse_label; }
get_ag-news() { hub fancyzhx/ag_news - ag-news train,test text=text label=label; }
get_wikipedia() {
    hub wikimedia/wikipedia 20231101.en wikipedia 'train[:10000]:train' 'text=text[:512]'
}

# classes SET FILE_OF_CLASS_0 FILE_OF_CLASS_1
classes() {
    printf 'text\tlabel\n' > "$new/$1_train.tsv"
    iconv -f latin1 "$new/$2" | sed $'s/$/\t0/' >> "$new/$1_train.tsv"
    iconv -f latin1 "$new/$3" | sed $'s/$/\t1/' >> "$new/$1_train.tsv"
}
get_senteval() {
    fetch $META/senteval/senteval_data/datasmall_NB_ACL12.zip
    python3 -m zipfile -e "$new/datasmall_NB_ACL12.zip" "$new"
    classes mr data/rt10662/rt-polarity.{neg,pos}
    classes cr data/customerr/custrev.{neg,pos}
    classes subj data/subj/subj.{objective,subjective}
    classes mpqa data/mpqa/mpqa.{neg,pos}
    fetch $GITHUB/PrincetonML/SIF/master/data/sentiment-test
    (printf 'text\tlabel\n'; cat "$new/sentiment-test") > "$new/sst2_test.tsv"
    rm -f data/sst2_test.*
    keep "$new"/*.tsv
}

QUESTIONS='({"context": part["context"], "question": one["question"], "answers": one["answers"],
             **LANGUAGES} for article in lines[0]["data"] for part in article["paragraphs"]
            for one in part["qas"])'
get_squad() {
    for split in train:train dev:test; do
        fetch https://rajpurkar.github.io/SQuAD-explorer/dataset/${split%:*}-v1.1.json
        convert ${split%:*}-v1.1.json squad_${split#*:}.jsonl "${QUESTIONS/LANGUAGES/dict()}"
    done
    keep "$new"/squad_*
}
get_mlqa() {
    fetch $META/MLQA/MLQA_V1.zip
    python3 -m zipfile -e "$new/MLQA_V1.zip" "$new"
    for path in "$new"/MLQA_V1/test/*.json; do
        name=$(basename "$path" .json)  # test-context-de-question-ar
        [[ $name =~ context-(..)-question-(..) ]]
        both="dict(lang_context='${BASH_REMATCH[1]}', lang_question='${BASH_REMATCH[2]}')"
        convert "MLQA_V1/test/$name.json" part.jsonl "${QUESTIONS/LANGUAGES/$both}"
        cat "$new/part.jsonl" >> "$new/mlqa_test.jsonl"
    done
    keep "$new/mlqa_test.jsonl"
}

CODES='acm aeb afr amh ary arz asm azb azj bel ben bos bul cat ces ckb cym dan deu ell epo est eus
fin fra gla gle glg guj hau heb hin hrv hun hye ind isl ita jav jpn kan kat kaz khm kir kor lao mal
mar mkd mya nld nno nob npi pol por ron rus san sin slk slv snd som spa srp sun swe swh tam tel tha
tur uig ukr urd vie xho zho'
get_flores() {
    fetch $META/nllb/flores200_dataset.tar.gz
    tar xzf "$new/flores200_dataset.tar.gz" -C "$new"
    printf eng_Latn > "$new/flores81.txt"
    for code in $CODES; do
        for path in "$new"/flores200_dataset/devtest/${code}_*.devtest; do
            name=$(basename "$path" .devtest)
            [ "$name" = zho_Hans ] || printf ,%s "$name" >> "$new/flores81.txt"
        done
    done
    fetch $META/nllb/laser/xsimplusplus/eng_Latn_augmented.devtest flores_altered.txt
    fetch $META/nllb/laser/xsimplusplus/eng_Latn_errtype.devtest.json flores_altered.json
    rm -rf data/flores
    mv "$new/flores200_dataset/devtest" "$new/flores"
    keep "$new"/{flores,flores81.txt,flores_altered.*}
}

get_bucc() {
    fetch https://comparable.limsi.fr/bucc2018/bucc2018-de-en.training-gold.tar.bz2
    tar xjf "$new/bucc2018-de-en.training-gold.tar.bz2" -C "$new"
    awk -F'\t' 'BEGIN {print "de\ten"} FILENAME !~ /gold$/ {text[$1] = $2; next}
        {print text[$1] "\t" text[$2]}' "$new"/bucc2018/de-en/de-en.training.{de,en,gold} \
        > "$new/bucc_de-en.tsv"
    keep "$new/bucc_de-en.tsv"
}

get_gsm8k() {
    for split in train test; do
        fetch $GITHUB/openai/grade-school-math/master/grade_school_math/data/$split.jsonl
        convert $split.jsonl gsm8k_$split.jsonl \
            '({"user": one["question"], "assistant": one["answer"]} for one in lines)'
    done
    keep "$new"/gsm8k_*
}

get_hellaswag() {
    fetch $GITHUB/rowanz/hellaswag/master/data/hellaswag_train.jsonl raw
    convert raw hellaswag_train.jsonl '({"user": one["ctx"] + "".join(
        f"\n{letter}) {ending}" for letter, ending in zip("ABCD", one["endings"])),
        "assistant": "ABCD"[one["label"]]} for one in lines)'
    keep "$new/hellaswag_train.jsonl"
}

get_llm-jepa() {
    git clone --quiet --depth 1 https://github.com/rbalestr-lab/llm-jepa "$new/llm-jepa"
    keep "$new"/llm-jepa/datasets/*.jsonl
}

get_multi30k() {
    for code in en de fr cs; do
        fetch $GITHUB/multi30k/dataset/master/data/task1/raw/train.$code.gz
    done
    keep "$new"/train.*.gz
}

get_wikitext() {
    fetch $GITHUB/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt
    mv "$new/train.txt" data/wikitext2_train.txt
}

if [ $# = 0 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
for name in "$@"; do
    if ! declare -F "get_$name" > /dev/null; then
        echo "error: there is no data set $name; without a name, this script lists them" >&2
        exit 2
    fi
done
mkdir -p data
for name in "$@"; do "get_$name"; done
