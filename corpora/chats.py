"""How families of decoders write a chat. Each is known by a token that only its tokenizers have."""

CHATML = ("<|im_start|>", "<|im_end|>", "system\n", "user\n", "<|im_end|>\n<|im_start|>")

# For each token: the tokens that open and end a row, then the texts that stand before the system
# turn (None for a family without one), before the user's turn, behind each of these two, and before
# the assistant's turn.
FAMILIES = {
    # DeepSeek-R1-Distill.
    "<｜User｜>": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
                 "", "<｜User｜>", "", "<｜Assistant｜>"),
    # Llama-3.
    "<|start_header_id|>": ("<|begin_of_text|>", "<|eot_id|>",
                            "<|start_header_id|>system<|end_header_id|>\n\n",
                            "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
                            "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    # Gemma.
    "<start_of_turn>": ("<bos>", "<end_of_turn>", None,
                        "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n"),
    # OLMo-2.
    "<|endofprompt|>": ("<|endoftext|>", "<|endoftext|>",
                        "<|system|>\n", "<|user|>\n", "\n", "<|assistant|>\n"),
    # Qwen3, asked not to think. It has <|im_start|> too, so it stands before the next one.
    "<think>": (*CHATML, "assistant\n<think>\n\n</think>\n\n"),
    # Qwen2, SmolLM2.
    "<|im_start|>": (*CHATML, "assistant\n"),
}
