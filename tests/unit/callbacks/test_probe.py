from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_tspipe.callbacks import OnlineLinearProbe
from lightning_tspipe.errors import ConfigurationError


class Classes(TensorDataset):
    """Points that a line tells apart."""

    def __init__(self, num: int) -> None:
        points = torch.randn(num, 4, generator=torch.Generator().manual_seed(num))
        super().__init__(points, (points[:, 0] > 0).long())


class Step(LightningModule):
    def __init__(self, num_views: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.num_views = num_views

    def training_step(self, batch: Any) -> Tensor:
        views = torch.cat([batch[0]] * self.num_views)
        return self.student(views).square().mean() + self.student(0 * views).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(num: int = 40) -> DataLoader[Any]:
    return DataLoader(Classes(num), batch_size=10)


def test_learns_from_the_first_call_as_any_classifier_would(lab: SimpleNamespace) -> None:
    module, probe = Step(), OnlineLinearProbe(2, Classes(30), lr=0.5, weight_decay=0.1)
    trainer = lab.trainer(callbacks=[probe], max_epochs=5)
    trainer.fit(module, loader())
    classifier = nn.Linear(4, 2)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    sgd = torch.optim.SGD(classifier.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for images, labels in [batch for _ in range(5) for batch in loader()]:
        sgd.zero_grad()
        cross_entropy(classifier(module.student(images).detach()), labels).backward()
        sgd.step()
    assert probe.classifier is not None
    torch.testing.assert_close(probe.classifier.state_dict(), classifier.state_dict())
    queries, labels = Classes(30).tensors
    hits = classifier(module.student(queries)).argmax(1) == labels
    assert trainer.callback_metrics["val_probe_top1"] == pytest.approx(hits.float().mean().item())
    assert trainer.callback_metrics["val_probe_top5"] == 1.0  # of two classes
    assert "training_step" not in vars(module)


def test_views_below_each_other_have_the_labels_of_the_batch(lab: SimpleNamespace) -> None:
    probes = []
    for num_views in (1, 3):
        probe = OnlineLinearProbe(2)
        lab.trainer(callbacks=[probe], max_epochs=2).fit(Step(num_views), loader())
        assert probe.classifier is not None
        probes.append(probe.classifier.weight)
    torch.testing.assert_close(*probes, rtol=1e-4, atol=1e-6)


def test_the_step_of_an_instance_comes_back(lab: SimpleNamespace) -> None:
    module = Step()
    own = module.training_step
    module.training_step = own  # type: ignore[method-assign]
    lab.trainer(callbacks=[OnlineLinearProbe(2)], max_epochs=1).fit(module, loader())
    assert vars(module)["training_step"] is own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "unused"}, "does not call 'unused'"),
        ({"features": "trunk"}, "no submodule 'trunk'"),
        ({"labels": lambda batch: batch[1][:7]}, "10 features of 'student', but 7 labels"),
        ({"labels": lambda batch: batch[1].tolist()}, "the labels are a list"),
    ],
)
def test_refused(options: dict[str, Any], message: str, lab: SimpleNamespace) -> None:
    module = Step()
    with pytest.raises(ConfigurationError, match=message):
        lab.trainer(callbacks=[OnlineLinearProbe(2, **options)]).fit(module, loader())
    assert "training_step" not in vars(module)


@pytest.mark.parametrize("options", [{"num_classes": 1}, {"lr": 0.0}, {"every_n_epochs": 0}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be at least"):
        OnlineLinearProbe(**{"num_classes": 3, **options})
