"""Optimizers, clips, regularizers, initializers and their attributes: old name -> what it becomes."""

from __future__ import annotations

from dataclasses import replace

from fleet_train.port.tables.rules import Rule, To, Todo

# Positional arguments behind those two changed their order between 1.6, 1.7 and 1.8: they are marked, see calls.py.
_TAIL = "parameter_list>parameters regularization>weight_decay grad_clip name"


def _optimizer(new: str, leading: str, more: str = "", hand: str = "") -> To:
    return To(
        f"paddle.optimizer.{new}",
        f"{leading} / {_TAIL} {more}".strip(),
        ordered=False,
        hand=hand or "name the arguments, whose order differs between Paddle 1.6, 1.7 and 1.8, and port again",
    )


OPTIMIZERS: dict[str, Rule] = {
    "SGD": _optimizer("SGD", "learning_rate"),
    "Momentum": _optimizer("Momentum", "learning_rate momentum", "use_nesterov"),
    # 1.8 added epsilon to the root of the corrected moment, today's Adam weighs it by sqrt(1 - beta2^t).
    "Adam": replace(
        _optimizer("Adam", "learning_rate beta1 beta2 epsilon", "lazy_mode"),
        values={"epsilon": {text: text for text in ("1e-8", "1e-08", "1e-9", "1e-09", "1e-10", "0.00000001")}},
        hand="paddle.optimizer.Adam: it multiplies epsilon by sqrt(1 - beta2**t), which 1e-8 does not show",
    ),
    "Adamax": _optimizer("Adamax", "learning_rate beta1 beta2 epsilon"),
    "Adagrad": _optimizer("Adagrad", "learning_rate epsilon", "initial_accumulator_value"),
    "Adadelta": Todo("paddle.optimizer.Adadelta: it heeds learning_rate, of which Paddle 1.8 took no notice (= 1.0)"),
    "RMSProp": _optimizer("RMSProp", "learning_rate rho epsilon momentum centered"),
    "Lamb": Todo("paddle.optimizer.Lamb: it corrects the bias of its moments, which Paddle 1.8 did not; tune the rate"),
    "LarsMomentum": To(
        "paddle.incubate.optimizer.LarsMomentumOptimizer",
        "learning_rate momentum / lars_coeff lars_weight_decay parameter_list regularization grad_clip name",
    ),
    "DGCMomentum": Todo("paddle.optimizer.Momentum with strategy.dgc (profile `dgc`): docs/compression.md"),
    "Recompute": Todo("strategy.recompute with recompute_configs, or recompute_every_blocks in a profile"),
    "Pipeline": Todo("nothing here: fleet_train does data parallelism"),
    "Lookahead": Todo("nothing here; local_sgd with outer momentum is near (docs/profiles.md)"),
    "GradientMerge": Todo("strategy.gradient_merge, or accumulate_steps in a profile"),
    "ModelAverage": Todo("--ema_decay of the reference trainer, or fleet_train.train's average="),
    "ExponentialMovingAverage": Todo("--ema_decay of the reference trainer, or fleet_train.train's average="),
    "Ftrl": Todo("nothing in Paddle 3"),
    "DecayedAdagrad": Todo("paddle.optimizer.RMSProp is the nearest"),
    "Dpsgd": Todo("nothing in Paddle 3"),
}

CLIPS: dict[str, Rule] = {
    "GradientClipByGlobalNorm": To("paddle.nn.ClipGradByGlobalNorm", "clip_norm / group_name need_clip-None"),
    "GradientClipByNorm": To("paddle.nn.ClipGradByNorm", "clip_norm / need_clip-None"),
    "GradientClipByValue": Todo("paddle.nn.ClipGradByNorm or ByGlobalNorm: ClipGradByValue knows no static programs"),
    "ErrorClipByValue": Todo("nothing in Paddle 3: clip the gradients (paddle.nn.ClipGradByNorm)"),
    "set_gradient_clip": Todo("give the clip to the optimizer: grad_clip=paddle.nn.ClipGradByGlobalNorm(clip_norm)"),
}

REGULARIZERS: dict[str, Rule] = {
    name: To(f"paddle.regularizer.{name}", "regularization_coeff>coeff") for name in ("L1Decay", "L2Decay")
}

_SEED = "seed-0"
_SEEDED = "leave out seed= and call paddle.seed(...) once before the network is built"

INITIALIZERS: dict[str, Rule] = {
    "Constant": To("paddle.nn.initializer.Constant", "value / force_cpu-"),
    "Uniform": To("paddle.nn.initializer.Uniform", f"low high / {_SEED} diag_num-0", hand=_SEEDED),
    "Normal": To("paddle.nn.initializer.Normal", f"loc>mean scale>std / {_SEED}", hand=_SEEDED),
    "TruncatedNormal": To("paddle.nn.initializer.TruncatedNormal", f"loc>mean scale>std / {_SEED}", hand=_SEEDED),
    "Xavier": To(
        "",
        f"uniform- / fan_in fan_out {_SEED}",
        choose=(
            "uniform",
            {
                "": "paddle.nn.initializer.XavierUniform",
                "True": "paddle.nn.initializer.XavierUniform",
                "False": "paddle.nn.initializer.XavierNormal",
            },
        ),
        hand="paddle.nn.initializer.XavierUniform or XavierNormal, without seed= (paddle.seed)",
    ),
    "MSRA": To(
        "",
        f"uniform- / fan_in {_SEED}",
        choose=(
            "uniform",
            {
                "": "paddle.nn.initializer.KaimingUniform",
                "True": "paddle.nn.initializer.KaimingUniform",
                "False": "paddle.nn.initializer.KaimingNormal",
            },
        ),
        hand="paddle.nn.initializer.KaimingUniform or KaimingNormal, without seed= (paddle.seed)",
    ),
    "Bilinear": To("paddle.nn.initializer.Bilinear", ""),
    "NumpyArray": To("paddle.nn.initializer.Assign", "value"),
}

ATTRIBUTES: dict[str, Rule] = {
    "ParamAttr": To(
        "paddle.ParamAttr", "name initializer learning_rate regularizer trainable do_model_average gradient_clip-None"
    ),
    "WeightNormParamAttr": Todo("paddle.nn.utils.weight_norm(layer, dim=dim) with a layer of paddle.nn"),
}
