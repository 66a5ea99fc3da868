"""A tiny model of random weights, for benchmarks and tests of servers: nonsense, but a millisecond a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EOS", "make_model"]

EOS = 1
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_model(folder: Path, *, layers: int = 2, seed: int = 11) -> Path:
    """A Llama of random weights whose tokens are characters, saved as transformers saves models."""
    import tokenizers
    import torch
    import transformers

    vocabulary = {"<unk>": 0, "<eos>": EOS, **{text: 2 + number for number, text in enumerate(CHARACTERS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.25)
        model.lm_head.weight[EOS] = 0  # answers are to have the length that a test asks for
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
