"""Write held-out documents with their right answers as the table a job reads.

python -m examples.tally.make_data --out examples/tally/out/documents.parquet --rows 500 --seed 7
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.tally.documents import heldout_documents


def main() -> None:
    """Write the columns `doc_id`, `document` and `expected`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    documents = list(heldout_documents(args.seed, args.rows))
    table = pa.table(
        {
            "doc_id": [f"doc-{index:06d}" for index in range(len(documents))],
            "document": [document.text for document in documents],
            "expected": [document.answer for document in documents],
        }
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, args.out)
    print(f"{args.out}: {table.num_rows} documents")


if __name__ == "__main__":
    main()
