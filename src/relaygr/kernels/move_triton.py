"""Pages moved by a kernel: a handful of blocks saturate the link to the host, and one launch moves a layer of a prefix.

The copy engines do as well per byte, but want a call for each page and layer.
"""

from typing import Final

import torch
import triton
import triton.language as tl

__all__ = ["move_pages"]

_BLOCKS: Final = 8
"""On an H200 eight reach 95% of what the copy engine reaches, and leave the other multiprocessors alone."""
_CHUNK: Final = 2048
"""Words of eight bytes that a block moves at a time."""


@triton.jit(do_not_specialize=["pages", "begin", "words", "page_words"])
def move_words(source, target, old, new, pages, begin, words, page_words, CHUNK: tl.constexpr):
    """Words begin … begin + words of every page, in chunks that the blocks share out."""
    chunks = (words + CHUNK - 1) // CHUNK
    for item in range(tl.program_id(0), pages * chunks, tl.num_programs(0)):
        page = item // chunks
        word = item % chunks * CHUNK + tl.arange(0, CHUNK)
        come = tl.load(old + page).to(tl.int64) * page_words + begin
        go = tl.load(new + page).to(tl.int64) * page_words + begin
        tl.store(target + go + word, tl.load(source + come + word, mask=word < words), mask=word < words)


def move_pages(
    source: torch.Tensor, target: torch.Tensor, old: torch.Tensor, new: torch.Tensor, first: int, last: int
) -> None:
    """See `move.move_pages`."""
    if not len(old):
        return
    layer_bytes = source[0, 0].numel() * source.element_size()
    words, layers = layer_bytes // 8, source.shape[1]
    flat = [pool.view(-1).view(torch.int64) for pool in (source, target)]
    move_words[min(_BLOCKS, len(old) * triton.cdiv((last - first) * words, _CHUNK)),](
        *flat, old, new, len(old), first * words, (last - first) * words, layers * words, CHUNK=_CHUNK, num_warps=8
    )
