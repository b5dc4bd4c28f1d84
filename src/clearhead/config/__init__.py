"""Every knob of every verb: one frozen dataclass per verb is its Python argument, its options and its config.json.

The text under each field is what `--help` prints. What a model's own configuration determines (widths, RoPE, grouped
heads, context) is derived when the verb runs and is no option; None means "derived" and the text says from what.
Nothing here loads torch or transformers or touches a file.
"""

from clearhead.config.bench import BenchCircuits, BenchGated, BenchLorsa, BenchSpectral, BenchZPattern
from clearhead.config.catalogue import Catalogue
from clearhead.config.circuits import CircuitCurve
from clearhead.config.convert import Convert
from clearhead.config.dictionaries import (
    FeatureActivation,
    Tracker,
    TrainClt,
    TrainDictionary,
    TrainFeatures,
    TrainSae,
    TrainTranscoder,
)
from clearhead.config.explain import Explain
from clearhead.config.fidelity import Fidelity, SweptKind, TrainSweep
from clearhead.config.frontier import Frontier
from clearhead.config.global_graph import CircuitGlobal
from clearhead.config.graph import GraphDiff, GraphExport, GraphFormat, GraphMerge
from clearhead.config.lorsa import (
    Activation,
    Analyze,
    Demo,
    Evaluate,
    Harvest,
    Initialisation,
    OfRun,
    TrainLorsa,
)
from clearhead.config.pretrain import Architecture, Pretrain
from clearhead.config.sparsify import Sparsify
from clearhead.config.sparsify_toy import SparsifyToy
from clearhead.config.spectral_features import Shrinkage, SpectralFeatures
from clearhead.config.spectral_run import Basis, OfTexts, SpectralRun, SpectralSweep
from clearhead.config.spectral_toy import SpectralToy
from clearhead.config.spectral_trace import SpectralTrace
from clearhead.config.steer import Steer
from clearhead.config.task import DescribeTask
from clearhead.config.trace import Replace, TracePrompt
from clearhead.config.trust import Trust
from clearhead.config.verb import SCHEMA, Dtype, OfLayers, OfModel, Split, Verb, resolve_layer, resolve_layers
from clearhead.config.view import View

VERBS: dict[str, type[Verb]] = {
    cls.verb: cls
    for cls in (
        Demo,
        Harvest,
        TrainLorsa,
        TrainTranscoder,
        TrainClt,
        TrainSae,
        TrainSweep,
        Convert,
        Evaluate,
        Fidelity,
        Analyze,
        Trust,
        Catalogue,
        Explain,
        View,
        Pretrain,
        Sparsify,
        SparsifyToy,
        Frontier,
        SpectralFeatures,
        SpectralRun,
        SpectralSweep,
        SpectralToy,
        SpectralTrace,
        DescribeTask,
        TracePrompt,
        Steer,
        Replace,
        CircuitCurve,
        CircuitGlobal,
        GraphDiff,
        GraphMerge,
        GraphExport,
        BenchCircuits,
        BenchGated,
        BenchLorsa,
        BenchSpectral,
        BenchZPattern,
    )
}
"""Each verb's configuration, in the order `clearhead --help` lists them."""

__all__ = [
    "SCHEMA",
    "VERBS",
    "Activation",
    "Analyze",
    "Architecture",
    "Basis",
    "BenchCircuits",
    "BenchGated",
    "BenchLorsa",
    "BenchSpectral",
    "BenchZPattern",
    "Catalogue",
    "CircuitCurve",
    "CircuitGlobal",
    "Convert",
    "Demo",
    "DescribeTask",
    "Dtype",
    "Evaluate",
    "Explain",
    "FeatureActivation",
    "Fidelity",
    "Frontier",
    "GraphDiff",
    "GraphExport",
    "GraphFormat",
    "GraphMerge",
    "Harvest",
    "Initialisation",
    "OfLayers",
    "OfModel",
    "OfRun",
    "OfTexts",
    "Pretrain",
    "Replace",
    "Shrinkage",
    "Sparsify",
    "SparsifyToy",
    "SpectralFeatures",
    "SpectralRun",
    "SpectralSweep",
    "SpectralToy",
    "SpectralTrace",
    "Split",
    "Steer",
    "TracePrompt",
    "SweptKind",
    "Tracker",
    "TrainClt",
    "TrainDictionary",
    "TrainFeatures",
    "TrainLorsa",
    "TrainSae",
    "TrainTranscoder",
    "Trust",
    "Verb",
    "View",
    "resolve_layer",
    "resolve_layers",
]
