"""The model and the tokenizer of a server, by name or from a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import xxhash

from lynx_net.errors import BackendMissingError
from lynx_net.integrations import gemma3, smollm2
from lynx_net.integrations.http.config import ConfigError
from lynx_net.integrations.http.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from lynx_net.integrations.http.config import ModelConfig
    from lynx_net.wire.layout import CacheLayout

__all__ = ["ServedModel", "load_model"]

_BUNDLED = {"smollm2": smollm2.load, "gemma3": gemma3.load}


class ServedModel:
    """A model, its tokenizer, and what a server must know of both.

    Attributes:
        name: what clients call it.
        created: seconds since 1970, for /v1/models.
        model: of transformers, in evaluation mode.
        dtype: of its weights and of its cache.
        context_tokens: the longest text it takes.
        stop_tokens: end its answers.
        fingerprint: differs between models whose caches do not fit each other.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: Any, context_tokens: int | None = None) -> None:
        self.name = name
        self.created = int(time.time())
        self.model = model
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._tokenizer = tokenizer
        config = cast("Any", model.config).get_text_config()
        allowed = int(config.max_position_embeddings)
        self.context_tokens = min(allowed, context_tokens or allowed)
        self.vocab_size = int(config.vocab_size)
        self.stop_tokens = _stop_tokens(model, tokenizer)
        self.fingerprint = _fingerprint(model)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special ones that the tokenizer puts before it. Blocks."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation in the model's template, up to where the answer begins. Blocks.

        Raises:
            ApiError: the model has no template, or the template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise bad_request(f"{self.name} has no chat template; use /v1/completions", code="no_chat_template")
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise bad_request(f"the model's chat template refuses the messages: {error}", "messages") from error
        return list(self._tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def layout(self, tokens: int) -> CacheLayout:
        """Of the cache of so many tokens."""
        from lynx_net.integrations.transformers import layout_of

        return layout_of(self.model.config, tokens, dtype=self.dtype)


def load_model(config: ModelConfig, context_tokens: int | None) -> ServedModel:
    """Load what the configuration names. Blocks for seconds.

    Raises:
        BackendMissingError: torch, transformers or the package with the weights is not installed.
        ConfigError: there is no such model.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise BackendMissingError(f"what the servers need ({error.name})", "torch") from error
    torch.set_num_threads(config.threads)
    if config.name in _BUNDLED:
        loaded = _BUNDLED[config.name](dtype=cast("Any", config.dtype))
        served = ServedModel(config.served_name or config.name, loaded.model, loaded.tokenizer, context_tokens)
    else:
        folder = Path(config.name)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.name: {config.name} is neither {', '.join(_BUNDLED)} nor a folder with a model")
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=getattr(torch, config.dtype)
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.name: {config.name} cannot be loaded: {error}") from error
        name = config.served_name or folder.resolve().name
        served = ServedModel(name, model.train(False), tokenizer, context_tokens)
    return served


def _stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for source, name in (
        (model.generation_config, "eos_token_id"),
        (model.config, "eos_token_id"),
        (tokenizer, "eos_token_id"),
    ):
        value = getattr(source, name, None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(found)


def _fingerprint(model: PreTrainedModel) -> str:
    """Of the sizes, and of a piece of every weight: reading all of them would take longer than it is worth."""
    digest = xxhash.xxh3_128(str(model.dtype).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:64].float().numpy().tobytes())
    return digest.hexdigest()
