"""The reference trainer's data and loaders, as configured and checked over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_train import fleet
from fleet_train.data import (
    ImageSettings,
    Loader,
    Participant,
    Splits,
    make_evaluation_loader,
    make_loader,
    open_splits,
    settle,
)
from fleet_train.train.reference.config import TrainConfig


@dataclass(frozen=True)
class Inputs:
    """Close it at the end: loaders may have processes."""

    train: Loader
    test: Loader
    batches_per_epoch: int

    def corrupt_images(self) -> int:
        """Files that could not be read, summed over all ranks; every rank calls this."""
        met = [loader.corrupt.names for loader in (self.train, self.test) if loader.corrupt is not None]
        return len({name for names in fleet.gather(met) for part in names for name in part})

    def close(self) -> None:
        self.train.close()
        self.test.close()


def open_data(config: TrainConfig) -> Splits:
    """The configured training and test data."""
    images = ImageSettings(image_size=config.image_size)
    return open_splits(config.data, config.data_dir, images=images, max_corrupt=config.max_corrupt)


def open_inputs(config: TrainConfig) -> Inputs:
    """Loaders of this rank's share. DataError on every rank if the ranks' data is inconsistent."""
    splits = open_data(config)
    participant = Participant.of(fleet.worker_index(), fleet.worker_endpoints())
    train = make_loader(splits.train, config.loader_settings(), participant, fleet.place())
    test = make_evaluation_loader(splits.test, config.loader_settings(), participant, fleet.place())
    return Inputs(train, test, settle(train, fleet.gather))
