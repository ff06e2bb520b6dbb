"""``paddle.fluid.layers`` and ``paddle.fluid.nets``: old name -> what it becomes. Signatures are those of 1.8.

Rows to ``compat`` keep their arguments: `fleet_train.compat` has the old signature and gives the old numbers.
"""

from __future__ import annotations

from dataclasses import replace

from fleet_train.port.rules import Rule, To, Todo

_F = "paddle.nn.functional."
_MATH = "exp log abs square sqrt rsqrt floor ceil sin cos tanh reciprocal"
_FUNCTIONS = {name: name for name in ("relu", "sigmoid", "softplus", "softsign")} | {"logsigmoid": "log_sigmoid"}
_LOGICAL = ("logical_and", "logical_or")
_COMPARISONS = "equal not_equal less_equal greater_than greater_equal"
_ELEMENTWISE = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "pow": "pow"}
_ELEMENTWISE |= {"max": "maximum", "min": "minimum"}
_REDUCTIONS = {name: name for name in ("mean", "max", "min", "prod", "all", "any")} | {"sum": "sum"}
_COMPAT = (
    "batch_norm conv2d conv2d_transpose cos_sim create_parameter embedding fc flatten group_norm layer_norm lrn mul "
    "one_hot pool2d"  # same names
)
_STRUCTURES = "assert_same_structure convert_to_list flatten is_sequence map_structure pack_sequence_as"
_SCHEDULER = (
    "use {}; give it to the optimizer as learning_rate and call its step() after each exe.run, with gradient merge "
    "(accumulate_steps) once in so many runs"
)
_DECAYS = {
    "piecewise_decay": "paddle.optimizer.lr.PiecewiseDecay(boundaries, values)",
    "cosine_decay": "paddle.optimizer.lr.LambdaDecay(learning_rate, lambda step: ...), which counts steps, not epochs",
    "polynomial_decay": "paddle.optimizer.lr.PolynomialDecay(learning_rate, decay_steps, end_lr, power, cycle)",
    "exponential_decay": "paddle.optimizer.lr.LambdaDecay(learning_rate, lambda n: decay_rate ** (n / decay_steps))",
    "natural_exp_decay": "paddle.optimizer.lr.LambdaDecay(learning_rate, lambda n: exp(-decay_rate * n / decay_steps))",
    "inverse_time_decay": "paddle.optimizer.lr.LambdaDecay(learning_rate, lambda n: 1 / (1 + rate * n / decay_steps))",
    "noam_decay": "paddle.optimizer.lr.NoamDecay(d_model, warmup_steps, learning_rate)",
    "linear_lr_warmup": "paddle.optimizer.lr.LinearWarmup(learning_rate, warmup_steps, start_lr, end_lr)",
}
_DROPOUT = {f"{quote}upscale_in_train{quote}": '"upscale_in_train"' for quote in "'\""}
_DROPOUT |= {f"{quote}downgrade_in_infer{quote}": '"downscale_in_infer"' for quote in "'\""}
_LOADER = "paddle.io.DataLoader(dataset, feed_list=[...], return_list=False), and feed what it yields"

SPECTRAL_NORM = "paddle.nn.SpectralNorm(weight.shape, dim, power_iters, eps)(weight)"
AUC = "paddle.metric.Auc on fetched predictions: the static one keeps no statistics, each value is of one batch"

_PADDED = "padded sequences with their lengths"
_SEQUENCES = {
    "pool": "a masked mean, sum or max",
    "conv": "paddle.nn.Conv1D",
    "softmax": "a masked softmax",
    "first_step": "x[:, 0]",
    "last_step": "paddle.take_along_axis at length - 1",
    "unpad": "paddle.masked_select",
    **dict.fromkeys("concat slice expand expand_as reshape scatter enumerate reverse".split(), "operators of paddle"),
}

# Layers of 1.x and of `paddle.static.nn` in 2.x, of which the latter are gone or fail in today's programs.
STATIC_LAYERS: dict[str, Rule] = {
    **{f"sequence_{name}": Todo(f"{layer} over {_PADDED}") for name, layer in _SEQUENCES.items()},
    "sequence_pad": Todo("pad the sequences where they are loaded, and feed their lengths"),
    "prelu": Todo("paddle.nn.PReLU(num_parameters)(x)"),
    "instance_norm": Todo("paddle.nn.InstanceNorm2D(num_features, epsilon)(input)"),
    "spectral_norm": Todo(SPECTRAL_NORM),
    "conv3d": Todo("paddle.nn.Conv3D(in_channels, num_filters, filter_size, ...)(input)"),
    "conv3d_transpose": Todo("paddle.nn.Conv3DTranspose(in_channels, num_filters, filter_size, ...)(input)"),
    "bilinear_tensor_product": Todo("paddle.nn.Bilinear(x_size, y_size, size)(x, y)"),
    "data_norm": Todo("paddle.nn.BatchNorm1D(num_features)(input), or normalize the data before it is fed"),
    "deform_conv2d": Todo("paddle.vision.ops.DeformConv2D(in_channels, num_filters, filter_size)(x, offset, mask)"),
    "nce": Todo("paddle.nn.functional.cross_entropy over all classes, or over negative samples that are fed"),
    "row_conv": Todo("paddle.nn.Conv1D over the steps, padded at their end"),
    "crf_decoding": Todo("paddle.text.viterbi_decode(potentials, transitions, lengths)"),
    "multi_box_head": Todo("paddle.vision.ops.prior_box and paddle.nn.Conv2D for each map of features"),
    "prior_box": Todo("paddle.vision.ops.prior_box(input, image, min_sizes, ...)"),
    "sparse_embedding": Todo("paddle.nn.Embedding(*size)(input): parameter servers are not supported"),
    "continuous_value_model": Todo("slices of the input: use_cvm=False drops its first two columns"),
    "StaticRNN": Todo("paddle.static.nn.while_loop, or paddle.nn.RNN(cell)"),
    "py_func": Todo("paddle.static.register_op, or compute in Python between two exe.run"),
}

LAYERS: dict[str, Rule] = {
    **STATIC_LAYERS,
    # Inputs and parameters
    "data": To(
        "compat.data",
        hand="paddle.static.data(name, [None, ...], dtype); pad sequences, which have no levels of detail today",
    ),
    "create_global_var": Todo(
        "paddle.pir.core.create_persistable_value(dtype, shape, name, initializer=...), or count in Python"
    ),
    # Layers with parameters
    **{name: To(f"compat.{name}") for name in _COMPAT.split()},
    # Activations
    **{name: To(f"paddle.{name}", "x name") for name in _MATH.split()},
    **{old: To(_F + new, "x name") for old, new in _FUNCTIONS.items()},
    "softmax": To(_F + "softmax", "input>x / use_cudnn- name axis"),
    "gelu": To(_F + "gelu", "x approximate"),
    "relu6": To(_F + "relu6", "x / threshold-6.0|6 name", hand="paddle.clip(x, 0.0, threshold)"),
    "leaky_relu": To(_F + "leaky_relu", "x / alpha>negative_slope=0.02 name"),
    "elu": To(_F + "elu", "x / alpha name"),
    "swish": To(_F + "swish", "x / beta-1.0|1 name", hand="x * paddle.nn.functional.sigmoid(beta * x)"),
    "hard_sigmoid": To(_F + "hardsigmoid", "x / slope=0.2 offset=0.5 name"),
    "hard_swish": To(
        _F + "hardswish",
        "x / threshold-6.0|6 scale-6.0|6 offset-3.0|3 name",
        hand="x * paddle.clip(x + offset, 0.0, threshold) / scale",
    ),
    "brelu": Todo("paddle.clip(x, t_min, t_max)"),
    "soft_relu": Todo("paddle.log(1 + paddle.exp(paddle.clip(x, -threshold, threshold)))"),
    "sign": To("paddle.sign", "x"),
    "pow": To("paddle.pow", "x / factor>y=1.0 name"),
    "scale": To(
        "paddle.scale", "x scale bias bias_after_scale / act name", act="act", hand="apply the activation yourself"
    ),
    "clip": To("paddle.clip", "x min max name"),
    "cast": To("paddle.cast", "x dtype"),
    "round": Todo("paddle.round(x): it rounds halves to even today, away from zero before"),
    # Arithmetic
    **{
        f"elementwise_{old}": To(
            f"paddle.{new}", "x y / axis--1 act name", act="act", otherwise=f"compat.elementwise_{old}"
        )
        for old, new in _ELEMENTWISE.items()
    },
    "elementwise_mod": Todo("paddle.remainder(x, y): its sign is that of y today, of x before; there is no axis"),
    "elementwise_floordiv": Todo("paddle.floor_divide(x, y): it rounds down today, to zero before; there is no axis"),
    "matmul": To(
        "paddle.matmul",
        "x y transpose_x transpose_y / alpha-1.0|1 name",
        hand="alpha * paddle.matmul(x, y, transpose_x, transpose_y)",
    ),
    "sum": To("paddle.add_n", "x>inputs"),
    "sums": To("paddle.add_n", "input>inputs / out-None", hand="paddle.assign(paddle.add_n(input), out)"),
    "mean": To("paddle.mean", "x / name"),
    **{
        f"reduce_{old}": To(f"paddle.{new}", "input>x / dim>axis keep_dim>keepdim name")
        for old, new in _REDUCTIONS.items()
    },
    "cumsum": Todo("paddle.cumsum(x, axis=-1): without an axis it flattens today; exclusive and reverse are gone"),
    "clip_by_norm": Todo("x * paddle.clip(max_norm / paddle.linalg.norm(x), max=1.0)"),
    "l2_normalize": Todo("paddle.nn.functional.normalize(x, axis=axis, epsilon=...): epsilon is inside another root"),
    # Comparisons
    **{name: To(f"paddle.{name}", "x y / cond-None", hand=f"paddle.{name}(x, y)") for name in _COMPARISONS.split()},
    "less_than": To("paddle.less_than", "x y / force_cpu- cond-None", hand="paddle.less_than(x, y)"),
    **{name: To(f"paddle.{name}", "x y / out-None name", hand=f"paddle.{name}(x, y)") for name in _LOGICAL},
    "logical_not": To("paddle.logical_not", "x / out-None name", hand="paddle.logical_not(x)"),
    # Shapes
    "transpose": To("paddle.transpose", "x perm name"),
    "reshape": To(
        "paddle.reshape",
        "x shape / actual_shape-None act inplace- name",
        act="act",
        hand="paddle.reshape(x, actual_shape)",
    ),
    "squeeze": To("paddle.squeeze", "input>x axes>axis name"),
    "unsqueeze": To("paddle.unsqueeze", "input>x axes>axis name"),
    "concat": To("paddle.concat", "input>x axis name"),
    "split": To("paddle.split", "input>x num_or_sections / dim>axis=-1 name"),
    "stack": To("paddle.stack", "x axis"),
    "unstack": To("paddle.unstack", "x axis num"),
    "expand": To("paddle.tile", "x expand_times>repeat_times name"),
    "expand_as": Todo("paddle.expand_as(x, y), or paddle.tile(x, times) where x was repeated more than from size 1"),
    "gather": To("paddle.gather", "input>x index / overwrite-True", hand="paddle.gather(input, index)"),
    "gather_nd": To("paddle.gather_nd", "input>x index name"),
    "slice": To("paddle.slice", "input axes starts ends"),
    "shape": To("paddle.shape", "input"),
    "pad": Todo("paddle.nn.functional.pad(x, paddings, value=pad_value)"),
    "pad2d": Todo("paddle.nn.functional.pad(input, [left, right, top, bottom]): the order of paddings has changed"),
    "argmax": To("paddle.argmax", "x / axis=0"),
    "argmin": To("paddle.argmin", "x / axis=0"),
    "argsort": Todo("paddle.sort(x, axis, descending) and paddle.argsort(x, axis, descending): it returned both"),
    "topk": To("paddle.topk", "input>x k / name"),
    "where": Todo("paddle.nonzero(condition)"),
    "image_resize": Todo("paddle.nn.functional.interpolate(x, size, scale_factor, mode, align_corners, align_mode)"),
    "resize_bilinear": Todo(
        "paddle.nn.functional.interpolate(x, size, mode='bilinear', align_corners=True, align_mode=1)"
    ),
    "resize_nearest": Todo("paddle.nn.functional.interpolate(x, size, mode='nearest', align_corners=True)"),
    # Constants
    "fill_constant": To(
        "paddle.full",
        "shape / dtype value>fill_value force_cpu- out-None",
        hand="paddle.assign(paddle.full(shape, value, dtype), out)",
    ),
    "fill_constant_batch_size_like": To("compat.fill_constant_batch_size_like"),
    "zeros": To("paddle.zeros", "shape dtype / force_cpu-"),
    "ones": To("paddle.ones", "shape dtype / force_cpu-"),
    "zeros_like": To("paddle.zeros_like", "x / out-None", hand="paddle.zeros_like(x)"),
    "ones_like": To("paddle.ones_like", "x / out-None", hand="paddle.ones_like(x)"),
    "assign": To("paddle.assign", "input>x output"),
    "range": To("paddle.arange", "start end step dtype"),
    "linspace": To("paddle.linspace", "start stop num dtype"),
    "increment": Todo("paddle.increment(x, value), or count in Python and feed the number"),
    # Losses and metrics
    "cross_entropy": To(
        _F + "cross_entropy",
        "input label / soft_label ignore_index +use_softmax=False +reduction='none'",
    ),
    "softmax_with_cross_entropy": To(
        _F + "softmax_with_cross_entropy",
        "logits label soft_label ignore_index numeric_stable_mode return_softmax axis",
    ),
    "sigmoid_cross_entropy_with_logits": To(
        _F + "binary_cross_entropy_with_logits",
        "x>logit label / ignore_index--100 name normalize-False +reduction='none'",
        hand="paddle.nn.functional.binary_cross_entropy_with_logits(x, label, reduction='none'), masked by yourself",
    ),
    "square_error_cost": To(_F + "square_error_cost", "input label"),
    "mse_loss": To(_F + "mse_loss", "input label"),
    "log_loss": To(_F + "log_loss", "input label epsilon name"),
    "label_smooth": To(_F + "label_smooth", "label / prior_dist epsilon dtype-'float32'|\"float32\" name"),
    "smooth_l1": Todo("paddle.nn.functional.smooth_l1_loss(x, y, reduction='none'), summed over each sample"),
    "huber_loss": Todo("paddle.nn.functional.smooth_l1_loss(input, label, reduction='none', delta=delta)"),
    "kldiv_loss": Todo("paddle.nn.functional.kl_div(x, target, reduction)"),
    "accuracy": To("paddle.static.accuracy", "input label k correct total"),
    "auc": Todo(AUC),
    "dropout": To(
        _F + "dropout",
        'x dropout_prob>p / is_test-False seed-None|0 name dropout_implementation>mode="downscale_in_infer"',
        values={"dropout_implementation": _DROPOUT},
        otherwise="compat.dropout",
    ),
    # Control flow
    "array_read": To("paddle.tensor.array_read", "array i"),
    "array_write": To("paddle.tensor.array_write", "x i array"),
    "array_length": To("paddle.tensor.array_length", "array"),
    "create_array": To("paddle.tensor.create_array", "dtype"),
    "cond": To("paddle.static.nn.cond"),
    "case": To("paddle.static.nn.case"),
    "switch_case": To("paddle.static.nn.switch_case"),
    "while_loop": To("paddle.static.nn.while_loop"),
    **{
        name: Todo("paddle.static.nn.cond / case / while_loop, or decide in Python and feed the result")
        for name in ("Switch", "While", "IfElse", "DynamicRNN")
    },
    # Readers
    "py_reader": To("compat.py_reader"),
    "create_py_reader_by_data": To("compat.create_py_reader_by_data"),
    "read_file": To("compat.read_file"),
    "double_buffer": Todo(_LOADER),
    # Learning rates
    **{name: Todo(_SCHEDULER.format(text)) for name, text in _DECAYS.items()},
    "autoincreased_step_counter": To("compat.autoincreased_step_counter"),
    # Recurrent networks and sequences
    **{
        name: Todo(f"{layer} over {_PADDED}")
        for name, layer in (
            ("dynamic_lstm", "paddle.nn.LSTM"),
            ("dynamic_gru", "paddle.nn.GRU"),
            ("lstm", "paddle.nn.LSTM"),
            ("gru_unit", "paddle.nn.GRUCell"),
        )
    },
    "sequence_mask": To(_F + "sequence_mask", "x maxlen dtype name"),
    **{f"utils.{name}": To(f"paddle.utils.layers_utils.{name}") for name in _STRUCTURES.split()},
    "Print": To("paddle.static.Print"),
}

# As Paddle 2.0 had them for a while.
OF_2_0 = ("elementwise_", "reduce_", "fill_constant")

NETS: dict[str, Rule] = {
    "simple_img_conv_pool": To("compat.simple_img_conv_pool"),
    "img_conv_group": To("compat.img_conv_group"),
    "scaled_dot_product_attention": Todo("paddle.nn.functional.scaled_dot_product_attention or MultiHeadAttention"),
    "glu": To("paddle.nn.functional.glu", "input>x dim>axis"),
    "sequence_conv_pool": Todo("paddle.nn.Conv1D over padded sequences, and a masked max"),
}


# Optimizers, clips, regularizers, initializers and their attributes: old name -> what it becomes.


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
    "DGCMomentum": Todo(
        "paddle.optimizer.Momentum with the profile int4_compression or streaming_diloco: docs/methods.md"
    ),
    "Recompute": Todo("strategy.recompute with recompute_configs, or recompute_every_blocks in a profile"),
    "Pipeline": Todo("nothing here: fleet_train does data parallelism"),
    "Lookahead": Todo("nothing here; local_sgd with outer momentum is near (docs/strategies.md)"),
    "GradientMerge": Todo("strategy.gradient_merge, or accumulate_steps in a profile"),
    "ModelAverage": Todo("--ema_decay of the reference trainer, or fleet_train.train's average="),
    "ExponentialMovingAverage": To("compat.ExponentialMovingAverage"),
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


def _uniform_or_normal(kind: str, fans: str) -> To:
    uniform, normal = f"paddle.nn.initializer.{kind}Uniform", f"paddle.nn.initializer.{kind}Normal"
    return To(
        "",
        f"uniform- / {fans} {_SEED}",
        choose=("uniform", {"": uniform, "True": uniform, "False": normal}),
        hand=f"{uniform} or {kind}Normal, without seed= (paddle.seed)",
    )


INITIALIZERS: dict[str, Rule] = {
    "Constant": To("paddle.nn.initializer.Constant", "value / force_cpu-"),
    "Uniform": To("paddle.nn.initializer.Uniform", f"low high / {_SEED} diag_num-0", hand=_SEEDED),
    "Normal": To("paddle.nn.initializer.Normal", f"loc>mean scale>std / {_SEED}", hand=_SEEDED),
    "TruncatedNormal": To("paddle.nn.initializer.TruncatedNormal", f"loc>mean scale>std / {_SEED}", hand=_SEEDED),
    "Xavier": _uniform_or_normal("Xavier", "fan_in fan_out"),
    "MSRA": _uniform_or_normal("Kaiming", "fan_in"),
    "Bilinear": To("paddle.nn.initializer.Bilinear", ""),
    "NumpyArray": To("paddle.nn.initializer.Assign", "value"),
}

ATTRIBUTES: dict[str, Rule] = {
    "ParamAttr": To(
        "paddle.ParamAttr", "name initializer learning_rate regularizer trainable do_model_average gradient_clip-None"
    ),
    "WeightNormParamAttr": Todo("paddle.nn.utils.weight_norm(layer, dim=dim) with a layer of paddle.nn"),
}
