"""All behaviours that are looked for, in the order in which they are reported."""

from clearhead.analysis.behaviours.attention import ATTENTION
from clearhead.analysis.behaviours.behaviour import Behaviour
from clearhead.analysis.behaviours.copy_suppression import COPY_SUPPRESSION
from clearhead.analysis.behaviours.name_mover import NAME_MOVER
from clearhead.analysis.behaviours.operand import OPERAND
from clearhead.analysis.behaviours.successor import SUCCESSOR
from clearhead.analysis.behaviours.thematic import THEMATIC_ANCHOR

BEHAVIOURS: tuple[Behaviour, ...] = (
    *ATTENTION,
    SUCCESSOR,
    NAME_MOVER,
    COPY_SUPPRESSION,
    THEMATIC_ANCHOR,
    OPERAND,
)
