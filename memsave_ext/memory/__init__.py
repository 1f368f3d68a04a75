"""Shows memory: how much is held, by what, and when."""

from .account import Region, Step, TensorAtPeak, Timeline
from .compare import Comparison, compare
from .events import CATEGORIES, PHASES
from .prediction.fits import Fit, Fits, fits
from .prediction.footprint import Footprint, footprint
from .prediction.step import PredictedStep, predict
from .snapshot import plot_snapshot
from .tracking import Track, track
from .usage import Usage, usage

__all__ = [
    "CATEGORIES",
    "PHASES",
    "Comparison",
    "Fit",
    "Fits",
    "Footprint",
    "PredictedStep",
    "Region",
    "Step",
    "TensorAtPeak",
    "Timeline",
    "Track",
    "Usage",
    "compare",
    "fits",
    "footprint",
    "plot_snapshot",
    "predict",
    "track",
    "usage",
]
