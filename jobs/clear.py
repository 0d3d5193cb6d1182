"""What --fresh deletes: files that a manifest of ours names, and nothing else."""

from batchmla.jobs.ledger import Ledger
from batchmla.jobs.manifest import manifest_path
from batchmla.jobs.progress import progress_path
from batchmla.jobs.report_path import report_path
from batchmla.jobs.segments import list_segments
from batchmla.jobs.series import series_path
from batchmla.jobs.store import Store
from batchmla.jobs.summary import summary_path


def clear_output(store: Store) -> None:
    """Empties an output folder of ours; without a manifest in it, nothing is touched.

    Each step is durable before the next, and the manifest goes last, so that a clearing cut short
    can be done again.
    """
    manifest = manifest_path(store.root)
    if not manifest.exists():
        return
    ledger, segments = Ledger(store), store.own / "segments"
    store.remove(store.root / "_SUCCESS")
    for part in ledger.read():
        store.remove(store.root / part.name)
    store.sync_folder(store.root)
    if segments.exists():
        for segment in list_segments(segments):
            store.remove(segment.path)
        store.sync_folder(segments)
    beside = (summary_path, progress_path, series_path, report_path)
    ledger.remove()
    for path_of in beside:
        store.remove(path_of(store.root))
    store.sync_folder(store.own)
    store.remove(manifest)
    store.sync_folder(store.own)
