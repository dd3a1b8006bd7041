"""How families of pretrained decoders write a chat."""

CHATML = ("<|im_start|>", "<|im_end|>", "system\n", "user\n", "<|im_end|>\n<|im_start|>")

# The key is a token that only tokenizers of this family have. Its value: the tokens that begin and
# end a row, then the texts before the system turn (None if the family has no such turn), before the
# user's turn, after each of these two turns, and before the assistant's turn.
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
    # Qwen3, with thinking turned off. It comes before Qwen2, because it also has <|im_start|>.
    "<think>": (*CHATML, "assistant\n<think>\n\n</think>\n\n"),
    # Qwen2, SmolLM2.
    "<|im_start|>": (*CHATML, "assistant\n"),
}
