"""One case for every metric class of torchmetrics for which torch alone suffices."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import (
    MetricCollection,
    audio,
    classification,
    clustering,
    detection,
    image,
    multimodal,
    nominal,
    regression,
    retrieval,
    segmentation,
    shape,
    text,
    wrappers,
)
from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio
from torchmetrics.image.fid import FrechetInceptionDistance

SAMPLES = 41
CLASSES = 5


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    data: tuple[Any, ...]
    """Each holds one entry for each sample: a tensor, or a list."""
    feed: Callable[..., None] = lambda metric, *batch: metric.update(*batch)

    def run(self, metric: Any, start: int, stop: int, batch: int) -> None:
        for first in range(start, stop, batch):
            last = min(stop, first + batch)
            self.feed(metric, *(values[first:last] for values in self.data))

    def in_double(self) -> "Case":
        data = tuple(x.double() if isinstance(x, Tensor) else x for x in self.data)
        return Case(self.name, lambda: self.make().set_dtype(torch.float64), data, self.feed)


def cases() -> list[Case]:
    """The same on every call: each process makes its own."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    random.seed(0)
    found = [
        *_classification(),
        *_regression(),
        *_clustering(),
        *_nominal(),
        *_retrieval(),
        *_text(),
        *_image(),
        *_audio(),
        *_shapes(),
        *_aggregation(),
        *_wrappers(),
    ]
    torch.set_rng_state(state)
    return found


def _classification() -> Iterator[Case]:
    rows, target = torch.randn(SAMPLES, CLASSES), torch.randint(CLASSES, (SAMPLES,))
    rows[torch.arange(SAMPLES), target] += 1.0
    flags = (torch.rand(SAMPLES) > 0.4).long()
    tasks: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
        "Binary": ({}, (torch.rand(SAMPLES), flags)),
        "Multiclass": ({"num_classes": CLASSES}, (rows.softmax(1), target)),
        "Multilabel": (
            {"num_labels": CLASSES},
            (torch.rand(SAMPLES, CLASSES), torch.randint(2, (SAMPLES, CLASSES))),
        ),
    }
    extras: dict[str, dict[str, Any]] = {
        "FBetaScore": {"beta": 2.0},
        "PrecisionAtFixedRecall": {"min_recall": 0.5},
        "RecallAtFixedPrecision": {"min_precision": 0.5},
        "SensitivityAtSpecificity": {"min_specificity": 0.5},
        "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    }
    for name in classification.__all__:
        task = next((task for task in tasks if name.startswith(task)), None)
        if task is None:
            continue
        rest, (sizes, data) = name.removeprefix(task), tasks[task]
        given, make = {**sizes, **extras.get(rest, {})}, getattr(classification, name)
        if name == "MulticlassExactMatch":
            data = torch.randint(2, (SAMPLES, 3)), torch.randint(2, (SAMPLES, 3))
        if rest in ("Fairness", "GroupStatRates"):
            given, data = {"num_groups": 2}, (*data, torch.arange(SAMPLES) % 2)
        yield Case(name, partial(make, **given), data)
        if rest in ("AUROC", "ROC", "AveragePrecision", "PrecisionRecallCurve"):
            yield Case(f"{name}, binned", partial(make, **given, thresholds=20), data)
    images = torch.randint(CLASSES, (SAMPLES, 7)), torch.randint(CLASSES, (SAMPLES, 7))
    make = partial(classification.MulticlassAccuracy, CLASSES, multidim_average="samplewise")
    yield Case("MulticlassAccuracy, samplewise", make, images)


def _regression() -> Iterator[Case]:
    x = torch.rand(SAMPLES) + 0.1
    y = x + 0.3 * torch.rand(SAMPLES)
    wide = torch.rand(SAMPLES, 3) + 0.1, torch.rand(SAMPLES, 3) + 0.1
    shares = wide[0] / wide[0].sum(1, keepdim=True), wide[1] / wide[1].sum(1, keepdim=True)
    special: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
        "ContinuousRankedProbabilityScore": ({}, (torch.rand(SAMPLES, 6), y)),
        "CosineSimilarity": ({"reduction": "mean"}, wide),
        "CriticalSuccessIndex": ({"threshold": 0.5}, (x, y)),
        "JensenShannonDivergence": ({}, shares),
        "KLDivergence": ({}, shares),
        "MinkowskiDistance": ({"p": 3}, (x, y)),
    }
    for name in regression.__all__:
        given, data = special.get(name, ({}, (x, y)))
        yield Case(name, partial(getattr(regression, name), **given), data)
    for name in ("PearsonCorrCoef", "ConcordanceCorrCoef", "SpearmanCorrCoef"):
        make = partial(getattr(regression, name), num_outputs=3)
        yield Case(f"{name}, three outputs", make, (wide[0], wide[0] + wide[1]))
    for kind in ("mean", "range", "std", "l2"):
        make = partial(regression.NormalizedRootMeanSquaredError, kind)
        yield Case(f"NormalizedRootMeanSquaredError, {kind}", make, (x, y))


def _clustering() -> Iterator[Case]:
    labels = torch.randint(3, (SAMPLES,)), torch.randint(3, (SAMPLES,))
    points = torch.randn(SAMPLES, 4), labels[0]
    for name in clustering.__all__:
        if name != "ClusterAccuracy":  # it needs torch_linear_assignment
            intrinsic = name in ("CalinskiHarabaszScore", "DaviesBouldinScore", "DunnIndex")
            yield Case(name, getattr(clustering, name), points if intrinsic else labels)


def _nominal() -> Iterator[Case]:
    labels = torch.randint(4, (SAMPLES,)), torch.randint(4, (SAMPLES,))
    for name in nominal.__all__:
        if name != "FleissKappa":
            yield Case(name, partial(getattr(nominal, name), num_classes=4), labels)
    counts = torch.randint(6, (SAMPLES, 3))
    counts[:, 2] = 10 - counts[:, 0] - counts[:, 1]
    yield Case("FleissKappa", partial(nominal.FleissKappa, mode="counts"), (counts,))


def _retrieval() -> Iterator[Case]:
    queries = torch.arange(SAMPLES) * 7 % 6  # one query's documents are on several ranks
    data = torch.rand(SAMPLES), torch.randint(2, (SAMPLES,)), queries
    for name in retrieval.__all__:
        yield Case(name, getattr(retrieval, name), data)


def _text() -> Iterator[Case]:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "home", "all", "day"]
    said = [" ".join(random.choices(words, k=random.randint(5, 9))) for _ in range(SAMPLES)]
    meant = []
    for sentence in said:
        changed = sentence.split()
        changed[random.randrange(len(changed))] = random.choice(words)
        meant.append(" ".join(changed))
    for name in (
        "CharErrorRate",
        "EditDistance",
        "ExtendedEditDistance",
        "MatchErrorRate",
        "WordErrorRate",
        "WordInfoLost",
        "WordInfoPreserved",
    ):
        yield Case(name, getattr(text, name), (said, meant))
    yield Case("EditDistance, each", partial(text.EditDistance, reduction="none"), (said, meant))
    several = [[sentence, other] for sentence, other in zip(meant, reversed(meant), strict=True)]
    for name in ("BLEUScore", "CHRFScore", "SacreBLEUScore", "TranslationEditRate"):
        yield Case(name, getattr(text, name), (said, several))
    tokens = torch.randn(SAMPLES, 4, 9), torch.randint(9, (SAMPLES, 4))
    yield Case("Perplexity", text.Perplexity, tokens)
    answers = [{"prediction_text": s, "id": str(i)} for i, s in enumerate(said)]
    wanted = [
        {"answers": {"answer_start": [0], "text": [s]}, "id": str(i)} for i, s in enumerate(meant)
    ]
    yield Case("SQuAD", text.SQuAD, (answers, wanted))


class Pixels(nn.Module):
    """In place of the Inception network, which would have to be downloaded."""

    num_features = 6

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :6].float()


def frechet() -> FrechetInceptionDistance:
    return FrechetInceptionDistance(Pixels())


def _real_and_fake(metric: Any, real: Tensor, fake: Tensor) -> None:
    metric.update(real, real=True)
    metric.update(fake, real=False)


def _image() -> Iterator[Case]:
    x = torch.rand(SAMPLES, 3, 16, 16)
    data = x, (x + 0.2 * torch.rand_like(x)).clamp(0, 1)
    wide = torch.rand(SAMPLES, 1, 48, 48), torch.rand(SAMPLES, 1, 48, 48)
    bounded: dict[str, Any] = {"data_range": 1.0}
    for name in (
        "ErrorRelativeGlobalDimensionlessSynthesis",
        "PeakSignalNoiseRatio",
        "RelativeAverageSpectralError",
        "RootMeanSquaredErrorUsingSlidingWindow",
        "SpatialCorrelationCoefficient",
        "SpectralAngleMapper",
        "SpectralDistortionIndex",
        "StructuralSimilarityIndexMeasure",
        "UniversalImageQualityIndex",
    ):
        given = bounded if name.startswith(("Peak", "Structural")) else {}
        yield Case(name, partial(getattr(image, name), **given), data)
    yield Case("TotalVariation", image.TotalVariation, (x,))
    yield Case("VisualInformationFidelity", image.VisualInformationFidelity, wide)
    make: Any = image.PeakSignalNoiseRatioWithBlockedEffect
    yield Case("PeakSignalNoiseRatioWithBlockedEffect", partial(make, **bounded), wide)
    make = partial(image.MultiScaleStructuralSimilarityIndexMeasure, **bounded)
    name = "MultiScaleStructuralSimilarityIndexMeasure"
    yield Case(name, partial(make, kernel_size=3, betas=(0.3, 0.7)), wide)
    make = partial(image.StructuralSimilarityIndexMeasure, **bounded, reduction="none")
    yield Case("StructuralSimilarityIndexMeasure, each", make, data)
    make = partial(image.PeakSignalNoiseRatio, data_range=(0.0, 1.0), dim=(1, 2, 3))
    yield Case("PeakSignalNoiseRatio, by image", make, data)
    yield Case("FrechetInceptionDistance", frechet, data, _real_and_fake)
    make = partial(image.MemorizationInformedFrechetInceptionDistance, Pixels())
    yield Case("MemorizationInformedFrechetInceptionDistance", make, data, _real_and_fake)


def _audio() -> Iterator[Case]:
    data = torch.randn(SAMPLES, 100), torch.randn(SAMPLES, 100)
    for name in (
        "ScaleInvariantSignalDistortionRatio",
        "ScaleInvariantSignalNoiseRatio",
        "SignalNoiseRatio",
    ):
        yield Case(name, getattr(audio, name), data)
    make: Any = partial(audio.SignalDistortionRatio, filter_length=8)
    yield Case("SignalDistortionRatio", make, data)
    pairs = torch.randn(SAMPLES, 2, 50), torch.randn(SAMPLES, 2, 50)
    make = audio.SourceAggregatedSignalDistortionRatio
    yield Case("SourceAggregatedSignalDistortionRatio", make, pairs)
    make = partial(audio.PermutationInvariantTraining, scale_invariant_signal_noise_ratio)
    yield Case("PermutationInvariantTraining", make, pairs)
    spectra = torch.randn(SAMPLES, 3, 5, 2), torch.randn(SAMPLES, 3, 5, 2)
    make = audio.ComplexScaleInvariantSignalNoiseRatio
    yield Case("ComplexScaleInvariantSignalNoiseRatio", make, spectra)


def _shapes() -> Iterator[Case]:
    labels = torch.randint(3, (SAMPLES, 8, 8)), torch.randint(3, (SAMPLES, 8, 8))
    for name in segmentation.__all__:
        make: Any = partial(getattr(segmentation, name), 3, input_format="index")
        yield Case(name, make, labels)
    one_hot = tuple(nn.functional.one_hot(x, 3).movedim(-1, 1) for x in labels)
    yield Case("MeanIoU, classes from the first batch", segmentation.MeanIoU, one_hot)
    kinds = torch.randint(3, (2, SAMPLES, 6, 6))
    panoptic = tuple(torch.stack([kind, torch.randint(2, kind.shape)], -1) for kind in kinds)
    for name in ("PanopticQuality", "ModifiedPanopticQuality"):
        yield Case(name, partial(getattr(detection, name), {0, 1}, {2}), panoptic)
    points = torch.randn(SAMPLES, 6, 3), torch.randn(SAMPLES, 6, 3)
    yield Case("ProcrustesDisparity", shape.ProcrustesDisparity, points)
    yield Case("LipVertexError", partial(multimodal.LipVertexError, [0, 1, 2]), points)


def _aggregation() -> Iterator[Case]:
    values, weights = torch.randn(SAMPLES), torch.rand(SAMPLES)
    for name in ("SumMetric", "MaxMetric", "MinMetric", "CatMetric", "MeanMetric"):
        yield Case(name, getattr(torchmetrics, name), (values,))
    yield Case("MeanMetric, with weights", torchmetrics.MeanMetric, (values, weights))


def _wrappers() -> Iterator[Case]:
    data = torch.randn(SAMPLES, CLASSES).softmax(1), torch.randint(CLASSES, (SAMPLES,))
    x = torch.rand(SAMPLES, 3)
    wide = x, x + 0.5 * torch.rand(SAMPLES, 3)
    accuracy = partial(classification.MulticlassAccuracy, CLASSES)
    f1 = partial(classification.MulticlassF1Score, CLASSES)
    curve = partial(classification.MulticlassAUROC, CLASSES)
    precision = partial(classification.MulticlassAveragePrecision, CLASSES)

    def tracker() -> Any:
        made = wrappers.MetricTracker(accuracy())
        made.increment()
        return made

    def tasks(metric: Any, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> None:
        metric.update({"class": a, "value": x}, {"class": b, "value": y})

    def multitask() -> Any:
        together = MetricCollection([accuracy(), f1()])
        return wrappers.MultitaskWrapper(
            {"class": together, "value": regression.MeanSquaredError()}
        )

    def collection() -> Any:
        return MetricCollection([accuracy(), f1(), curve(), precision()], prefix="test/")

    make: dict[str, Callable[[], Any]] = {
        "MinMaxMetric": lambda: wrappers.MinMaxMetric(accuracy()),
        "ClasswiseWrapper": lambda: wrappers.ClasswiseWrapper(accuracy(average=None)),
        "LambdaInputTransformer": lambda: wrappers.LambdaInputTransformer(accuracy(), torch.neg),
        "MetricTracker": tracker,
        "MetricCollection": collection,
        "CompositionalMetric": lambda: (accuracy(average="micro") + 2 * accuracy()) / 3,
    }
    for name, maker in make.items():
        yield Case(name, maker, data)
    outputs = partial(wrappers.MultioutputWrapper, regression.PearsonCorrCoef(), 3)
    yield Case("MultioutputWrapper", outputs, wide)
    yield Case("MultitaskWrapper", multitask, (*data, *wide), tasks)
    flags = torch.rand(SAMPLES), torch.rand(SAMPLES)
    binary = partial(wrappers.BinaryTargetTransformer, threshold=0.5)
    yield Case("BinaryTargetTransformer", lambda: binary(classification.BinaryAUROC()), flags)
    pictures = torch.rand(SAMPLES, 3, 4, 4), torch.rand(SAMPLES, 3, 4, 4)
    yield Case("FeatureShare", lambda: wrappers.FeatureShare([frechet()]), pictures, _real_and_fake)
