"""Write the files of tests/test_cases.py that are the same sentences in another format."""

WHO = [words.split() for words in (
    "baker Bäcker", "king König", "farmer Bauer", "sailor Matrose", "teacher Lehrer",
    "judge Richter", "pilot Pilot", "dog Hund", "fox Fuchs", "cook Koch", "guest Gast",
    "smith Schmied")]
DOES = [words.split(", ") for words in (
    "opens the window, öffnet das Fenster", "waters the roses, gießt die Rosen",
    "reads a letter, liest einen Brief", "buys fresh bread, kauft frisches Brot",
    "cleans the car, putzt das Auto", "sings a song, singt ein Lied",
    "counts the apples, zählt die Äpfel", "paints a blue door, streicht eine blaue Tür")]
# 96 sentences in two languages.
EN, DE = ([f"{article} {who[column]} {does[column]}." for who in WHO for does in DOES]
          for column, article in enumerate(("The", "Der")))


def table(names, *columns, separator="\t"):
    """Return a file with these columns, as long as the shortest."""
    rows = [names.split(","), *zip(*columns)]
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


def lines(texts, pattern="{}\n"):
    """Return each text in a pattern, which can also contain its number, {1}."""
    return "".join(pattern.format(text, number) for number, text in enumerate(texts))


def files():
    """Return {name: text}."""
    pairs = table("en,de", EN[:60], DE)
    # 192 rows in three columns.
    days = [[pattern.format(text, day) for day in (1, 2) for text in texts] for texts, pattern in (
        (EN, "On day {1}: {0}"), (DE, "Am Tag {1}: {0}"), (EN, "{0} That was day {1}."))]
    later = [f"{text} Again." for text in EN]
    return {
        "k8_pipes/data.csv": table("en,de", EN[:60], DE, separator="|"),
        "k8_tab_in_csv/pairs.csv": pairs,
        "k8_tab_in_csv/sentences.csv": lines(EN[:60], "10{1:02}\teng\t{0}\n"),
        "k8_tabs_in_txt/deu.txt": lines(EN[:60], "{0}\t{0}\tCC-BY 2.0: tatoeba.org #{1} (CK)\n"),
        **{f"k9_bom_inside/data.{name}": f"\ufeff{lines(texts[:40])}\ufeff{lines(texts[40:80])}"
           for name, texts in (("en", EN), ("de", DE))},
        "k10_invisible_cell/data.tsv": table("en,de", EN[:60], [
            text if number % 4 else "\u200b" for number, text in enumerate(DE)]),
        "k11_interrupt/data.tsv": pairs,
        "k12_eval_limit_0/data.tsv": pairs,
        "k12_eval_limit_0/more.tsv": table("en,de", later[:48], DE),
        "k12_too_few_rows/nine.tsv": table("en,de", EN[:9], DE),
        "k12_too_few_rows/ten.tsv": table("en,de", EN[:10], DE),
        "k12_block_too_long/train.txt": lines(EN[:59]),
        "k12_block_too_long/eval.txt": lines(later[:20]),
        "k12_many_valid/train.txt": lines(EN[:80]),
        "k12_many_valid/valid.txt": lines(later[:25]),
        **{f"k16_apple_double/devtest/{name}_Latn.devtest": lines(texts[:60])
           for name, texts in (("eng", EN), ("deu", DE))},
        "w9_summary/data.tsv": table("en,de,summary", *days)}


def write(folder):
    """Write the files below a folder."""
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
