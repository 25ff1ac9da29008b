"""Has PyTorch's analyser read flight records, and prints the groups and the collectives that it found as JSON.

    torchfrtrace.py FOLDER [OPTION ...]
"""
import json
import pickle
import sys
import tempfile

from torch.distributed.flight_recorder import fr_trace

with tempfile.NamedTemporaryFile() as output:
    fr_trace.main([*sys.argv[1:], "-o", output.name])
    types, database = pickle.load(output)
collectives = [
    {
        "group": collective.pg_desc,
        "sequence": collective.collective_seq_id,
        "name": collective.collective_name,
        "passes": collective.pass_check,
        "missing": sorted(collective.missing_ranks or []),
        "culprits": sorted(collective.mismatch_collectives or {}),
        "frames": [frame["filename"] for frame in collective.collective_frames],
    }
    for collective in database.collectives
]
print(json.dumps({"groups": sorted({(group.desc, group.size) for group in database.groups}), "collectives": collectives}))
