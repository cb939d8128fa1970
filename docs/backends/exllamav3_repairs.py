"""Repairs of the bugs of exllamav3.md, so that others would show. Each takes
the function of ExLlamaV3 and returns another."""

from exllamav3_steps import PAGE
from exllamav3 import Job
from exllamav3.generator.pagetable import (CachePage, Sequence, random_hash,
                                           tensor_hash_checksum)


def postpone(rule):
    """A page that a banned string may rewind gets its hash after the match."""
    def hash_completed_page(job, sequence, index):
        pages = sequence.allocated_pages
        if not (getattr(job, "sampling", False) and job.banned_strings and
                job.checkpoint is None):
            return rule(job, sequence, index)
        job.late = sequence, index
        if index + 1 < len(pages):
            pages[index + 1].prev_hash = pages[index].phash
    return hash_completed_page


def sample(rule):
    """As above."""
    def receive_sample(job, *arguments, **named):
        job.sampling, job.late = True, None
        said = rule(job, *arguments, **named)
        job.sampling = False
        if job.late and not job.checkpoint_rewound:
            if job.checkpoint:
                job.checkpoint["deferred_pages"].append(job.late)
            else:
                job.hash_completed_page(*job.late)
        return said
    return receive_sample


def give_way(rule):
    """A page that waits to be computed leaves its hash to a complete page."""
    def hash_completed_page(job, sequence, index):
        pages, known = sequence.allocated_pages, job.pagetable.referenced_pages
        value = tensor_hash_checksum(
            sequence.sequence_ids.torch_slice(index * PAGE, (index + 1) * PAGE),
            pages[index - 1].phash if index else None)
        other = known.get(value)
        if other and other is not pages[index] and other.kv_position < PAGE:
            other.phash = random_hash()
            known[other.phash] = known.pop(value)
        rule(job, sequence, index)
    return hash_completed_page


def keep(rule):
    """Complete pages stay complete while their rows are computed again."""
    def prefill(job, *arguments):
        pages = [page for page in job.sequences[0].allocated_pages
                 if page.kv_position == PAGE]
        rule(job, *arguments)
        for page in pages:
            page.kv_position = PAGE
    return prefill


def link(rule):
    """Each page follows the page before it, whether that is complete or not."""
    def allocate_pages(sequence, *arguments):
        said = rule(sequence, *arguments)
        pages = sequence.allocated_pages
        for before, page in zip(pages, pages[1:]):
            if page.kv_position == 0:
                page.prev_hash = before.phash
        return said
    return allocate_pages


def forget(rule):
    """A page whose hash is taken when it is given back loses its tokens."""
    def sub_ref(page):
        known = page.phash_revert if page.can_revert else page.phash
        rule(page)
        if page.ref_count == 0 and page.phash != known:
            page.kv_position = 0
    return sub_ref


def refuse(rule):
    """A prompt that leaves no room for an answer is refused at once."""
    def prepare_for_queue(job, generator, number, rq=False):
        room = generator.max_total_tokens - generator.max_draft_tokens - 1
        assert rq or len(job.sequences[0].input_ids) < room, \
            "it cannot be enqueued"
        return rule(job, generator, number, rq)
    return prepare_for_queue


REPAIRS = {
    "banned": [(Job, "hash_completed_page", postpone),
               (Job, "receive_sample", sample)],
    "waiting": [(Job, "hash_completed_page", give_way)],
    "again": [(Job, "prefill", keep)],
    "linked": [(Sequence, "allocate_pages", link)],
    "taken": [(CachePage, "sub_ref", forget)],
    "full": [(Job, "prepare_for_queue", refuse)],
}
