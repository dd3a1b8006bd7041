"""The facts of a run in words: for the page of look/ and the model card of an export."""


def facts_of(header, last):
    """Return {what: text} of a run, from the first line of its log and its last step: what was
    trained, on what, and for how long. Facts that it lacks are left out."""
    config = header["config"]
    found = {"command": header.get("command"),
             "starts from": config.get("init") or header.get("imported") or "random weights"}
    if "rows" in header:
        train, held_out = header["rows"]
        # The log has two of the columns of more views.
        columns = ", ".join(header["columns"]) + ", ..." * (header["views"] > 2)
        where = f"in {config['eval_data']}" if config.get("eval_data") else "held out"
        found["data"] = f"{config['data']}: {train:,} rows of {columns}, and {held_out:,} {where}"
        found["parameters"] = f"{header['parameters']:,}"
    if "step" in last:
        found["steps"] = f"{last['step']:,} of {config['steps']:,}"
        found["training time"] = f"{last['seconds']:,.0f} s"
    return {what: text for what, text in found.items() if text}
