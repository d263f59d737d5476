"""Models of audio, of a protein and of an image's embedding, at published widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers.models import transformers, unets
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from benchmarks.models.published import Given, Published, Size


@dataclass(frozen=True)
class Length(Size):
    """Tokens or samples along one axis."""

    length: int
    form: ClassVar[str] = "LENGTH"

    @property
    def latent(self) -> tuple[int, ...]:
        return (self.length,)

    def check(self) -> None:
        pass


class PublishedSequence(Published):
    tiny_sizes: tuple[Any, ...] = (Length(16),)
    timestep = 0.8


class StableAudio(PublishedSequence):
    """Stable Audio Open 1.0, 47 s."""

    key, name = "stable_audio", "Stable Audio Open, 12 blocks"
    cls = transformers.StableAudioDiTModel
    config = {"num_layers": 12}
    sizes = (Length(1024),)
    text_tokens = 130  # with the start and the duration

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length = model.config, given.size.length
        # The first token is the global state.
        rotation = get_1d_rotary_pos_embed(
            config.attention_head_dim // 2,
            length + 1,
            use_real=True,
            repeat_interleave_real=False,
        )
        channels = config.cross_attention_input_dim
        return {
            "hidden_states": given.normal(1, config.in_channels, length).repeat(2, 1, 1),
            "timestep": given.timesteps().to(given.dtype),
            "encoder_hidden_states": given.normal(2, given.text_tokens, channels),
            "global_hidden_states": given.normal(2, 1, config.global_states_input_dim),
            "rotary_embedding": tuple(table.to(given.device) for table in rotation),
        }


class StableAudio3(PublishedSequence):
    key, name = "stable_audio_3", "Stable Audio 3, 12 blocks"
    cls = transformers.StableAudio3DiTModel
    config = {"depth": 12}
    sizes = (Length(1024),)
    text_tokens = 257  # with the duration

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config = model.config
        return {
            "hidden_states": given.normal(1, config.io_channels, given.size.length).repeat(2, 1, 1),
            "timestep": given.timesteps(2).to(given.dtype),
            "encoder_hidden_states": given.normal(2, given.text_tokens, config.cond_token_dim),
            "global_hidden_states": given.normal(2, config.global_cond_dim),
            "encoder_attention_mask": torch.stack([given.text_mask(n) for n in (8, 64)]),
        }


class AceStep(PublishedSequence):
    """ACE-Step 1.5, 120 s."""

    key, name = "ace_step", "ACE-Step 1.5, 8 blocks"
    cls = transformers.AceStepTransformer1DModel
    config = {"num_hidden_layers": 8}
    sizes = (Length(3000),)
    text_tokens = 1024  # with the lyrics

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length = model.config, given.size.length
        latents = config.audio_acoustic_hidden_dim
        channels = config.encoder_hidden_size or config.hidden_size
        time = given.timesteps(2).to(given.dtype)
        return {
            "hidden_states": given.normal(1, length, latents).repeat(2, 1, 1),
            "timestep": time,
            "timestep_r": time,
            "encoder_hidden_states": given.normal(2, given.text_tokens, channels),
            "context_latents": given.normal(2, length, config.in_channels - latents),
        }


class LongCatAudio(PublishedSequence):
    """60 s. Guidance is a forward of its own."""

    key, name = "longcat_audio", "LongCat-AudioDiT, 12 blocks"
    cls = transformers.LongCatAudioDiTTransformer
    config = {"dit_depth": 12}
    sizes = (Length(704),)
    text_tokens = 128

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length, device = model.config, given.size.length, given.device
        return {
            "hidden_states": given.normal(1, length, config.latent_dim),
            "encoder_hidden_states": given.normal(1, given.text_tokens, config.dit_text_dim),
            "encoder_attention_mask": given.text_mask(given.text_tokens)[None],
            "timestep": given.timesteps().to(given.dtype),
            "attention_mask": torch.ones(1, length, dtype=torch.bool, device=device),
            "latent_cond": given.normal(1, length, config.latent_dim),
        }


class MiniMaxMusic3(PublishedSequence):
    """Guidance is a forward of its own. The condition has the latents' frames."""

    key, name = "minimax_music3", "MiniMax-Music 3, 12 blocks"
    cls = transformers.MiniMaxMusic3Transformer1DModel
    config = {"num_layers": 12}
    sizes = (Length(1500),)
    text_tokens = 0

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length = model.config, given.size.length
        return {
            "hidden_states": given.normal(1, config.in_channels, length),
            "timestep": given.timesteps().to(given.dtype),
            "encoder_hidden_states": given.normal(1, length, config.condition_dim),
        }


class Proteina(PublishedSequence):
    """256 residues without the features of conditions."""

    key, name = "rfd4_proteina", "RFD4-Proteina, 6 blocks"
    cls = transformers.RFD4ProteinaTransformer
    config = {
        "nlayers": 6,
        "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
        "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
        "feats_pair_repr": ("xt_bb_ca_pair_dists",),
    }
    sizes = (Length(256),)
    text_tokens = 0

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length, device = model.config, given.size.length, given.device
        ones = torch.ones(1, length, dtype=torch.bool, device=device)
        time = given.timesteps().to(given.dtype)
        return {
            "bb_ca": given.normal(1, length, 3),
            "local_latents": given.normal(1, length, config.latent_dim),
            "bb_ca_time": time,
            "local_latents_time": time,
            "padding_mask": ones,
            "token_type": ones.long(),
            "conditioning": {"is_in_context_conditioning": ~ones, "supports_local_latent": ones},
        }


class Prior(PublishedSequence):
    """Kandinsky 2.2's prior."""

    key, name = "kandinsky_prior", "Kandinsky 2.2 prior, 10 blocks"
    cls = transformers.PriorTransformer
    config = {"num_layers": 10, "embedding_dim": 1280}
    sizes = tiny_sizes = (Length(1),)
    text_tokens = 0  # the configuration's
    timestep = 800

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, device = model.config, given.device
        tokens, channels = config.num_embeddings, config.embedding_dim
        masked = torch.arange(tokens, device=device) < torch.tensor([[2], [20]], device=device)
        return {
            "hidden_states": given.normal(1, channels).repeat(2, 1),
            "timestep": torch.tensor(given.timestep, device=device),
            "proj_embedding": given.normal(2, channels),
            "encoder_hidden_states": given.normal(2, tokens, channels),
            "attention_mask": masked,
        }


class SpectrogramDecoder(PublishedSequence):
    """Spectrogram diffusion's decoder: notes, and the spectrogram of the segment before."""

    key, name = "t5_film", "T5 FiLM decoder"
    cls = transformers.T5FilmDecoder
    takes_return_dict = False
    sizes, tiny_sizes = (Length(256),), (Length(6),)
    text_tokens = 2048

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        config, length = model.config, given.size.length
        encoded = [
            (given.normal(1, count, config.d_model), given.normal(1, count).fill_(1))
            for count in (given.text_tokens, length)
        ]
        return {
            "encodings_and_masks": encoded,
            "decoder_input_tokens": given.normal(1, length, config.input_dims),
            "decoder_noise_time": given.timesteps().to(given.dtype),
        }


class DanceDiffusion(PublishedSequence):
    """Samples of stereo audio, 14 levels with attention at the last five."""

    key, name = "dance_diffusion", "Dance Diffusion"
    cls = unets.UNet1DModel
    config = {
        "extra_in_channels": 16,
        "time_embedding_dim": 16,
        "block_out_channels": (128, 128, 256, 256, *(512,) * 10),
        "down_block_types": (
            "DownBlock1DNoSkip",
            *("DownBlock1D",) * 8,
            *("AttnDownBlock1D",) * 5,
        ),
        "up_block_types": (*("AttnUpBlock1D",) * 5, *("UpBlock1D",) * 8, "UpBlock1DNoSkip"),
    }
    sizes, tiny_sizes = (Length(65536),), (Length(32),)
    text_tokens = 0

    def arguments(self, model: Any, given: Given) -> dict[str, Any]:
        return {
            "sample": given.normal(1, model.config.in_channels, given.size.length),
            "timestep": torch.tensor(given.timestep, device=given.device),
        }


SEQUENCES = (
    *(StableAudio(), StableAudio3(), AceStep(), LongCatAudio(), MiniMaxMusic3()),
    *(Proteina(), Prior(), SpectrogramDecoder(), DanceDiffusion()),
)
