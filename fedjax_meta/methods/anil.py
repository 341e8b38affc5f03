"""ANIL: FedMeta whose clients adapt the head alone; the meta-gradient moves all leaves.

Raghu, Raghu, Bengio, Vinyals: "Rapid learning or feature reuse? Towards understanding the effectiveness of MAML", ICLR 2020,
arXiv 1909.09157.

| paper | here | shape |
|---|---|---|
| theta_1..l-1, theta_l | leaves outside and inside `adapts` | |
| inner and outer rate | `inner_lr`, `outer_lr` | scalars |

Differs from the paper: clients take the place of tasks, and the outer step is a round of `fedmeta`, with its options.
"""

from fedjax_meta.builders import described, variant
from fedjax_meta.contract import Method, Reduction
from fedjax_meta.methods.fedmeta import fedmeta
from fedjax_meta.task import Task


@described("adapts the head alone", "Raghu et al. 1909.09157")
@variant(fedmeta, adapts="head")
def anil(task: Task) -> Method:
    """ANIL. Every client, known or new, adapts the head to its support set; the body is the server's."""


REDUCES_TO = (Reduction("ANIL that adapts all leaves is FedMeta", "anil", {"adapts": "all"}, "fedmeta", {}),)
