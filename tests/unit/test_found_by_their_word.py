"""What readers of articles on PyTorch DDP, Apex, Horovod, DALI and Fleet 1.8 know is found, by its word."""

from __future__ import annotations

import pytest

from tests.support.processes import ROOT

ENGLISH = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
CHINESE = "\n".join(path.read_text() for path in [ROOT / "README_cn.md", *sorted((ROOT / "docs/zh").glob("*.md"))])
CODE = (
    """
--nnodes|--node_rank|--nproc_per_node|--master_addr|--master_port|torch.distributed.launch|torchrun|mp.spawn
torch.multiprocessing|horovodrun|-np 4|-H host1:2|mpirun|nn.DataParallel|DistributedDataParallel|device_ids
init_process_group|init_method|backend="nccl"|destroy_process_group|dist.barrier|dist.get_rank|get_world_size
--local_rank|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|set_device
NCCL_DEBUG|NCCL_IB_DISABLE|NCCL_SOCKET_IFNAME|DistributedSampler|set_epoch|drop_last|num_workers|pin_memory
non_blocking|data_prefetcher|DALI|iostat|sysstat|per_node_batch_size|zero_grad|loss.backward|optimizer.step
find_unused_parameters|bucket_cap_mb|no_sync|clip_grad_norm_|convert_sync_batchnorm|convert_syncbn_model
amp.initialize|opt_level|O3|keep_batchnorm_fp32|scale_loss|GradScaler|loss_scale|amp.state_dict|nvcc
reduce_tensor|op=SUM|all_reduce|hvd.init|hvd.local_rank|hvd.size|hvd.broadcast_parameters|hvd.DistributedOptimizer
hvd.Compression.fp16|hvd.allreduce|HOROVOD_FUSION_THRESHOLD|torch.save|model.module|state_dict|map_location|strict=False
init_seeds|np.random.seed|cudnn.deterministic|cudnn.benchmark|ifconfig|ping|Anaconda|NFS|Samba
cuDNN|NCCL|DistributedStrategy|PaddleCloudRoleMaker|paddle.distributed.launch|--cluster_node_ips|--node_ip
--started_port|--selected_gpus|--log_dir|workerlog|save_persistables|save_inference_model|--use_paddlecloud
apex.parallel|output_device|named_parameters|.to(device)|GIL|dist.scatter|async_op|num_replicas|print(os.environ)
http_proxy|paddlecloud job|--start-cmd|--is-standalone|--distribute-job-type|launch --help|__getitem__|TFRecord|MXNet
MobileNet|ShuffleNet|_transpile|DistributeTranspiler|multi_tensor_applier|apex.optimizers|fp16_utils|roi_align|nms
model.eval|no_grad|AverageMeter|loss.item|topk|tqdm|nvidia-smi|amp.load_state_dict|ReduceOp.SUM|reduce_op.SUM
extra_link_args|g++|libnccl2|LD_LIBRARY_PATH|~/.bashrc|PyTorch 1.4|10.2|440.33|Windows|Ubuntu 18.04|2080 Ti|V100
opencv|matplotlib|Cython|thop|FLOPs|PyCharm|num_classes|torchvision|CrossEntropyLoss|weight.grad|1 Hour
fluid.layers.data|paddle.fluid.incubate.fleet.collective|FLAGS_sync_nccl_allreduce|cudaMalloc|nccl_comm_num
FLAGS_fraction_of_gpu_memory_to_use|FLAGS_fuse_parameter_memory_size|FLAGS_fuse_parameter_groups_size|RDMA
num_iteration_per_drop_scope|fetch_frequency|use_hierarchical_allreduce|local_sgd_is_warm_steps|local_sgd_steps
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
"""Words of programs and commands: in both languages."""
WORDS = {
    "数据并行": "data parallel",
    "模型并行": "model parallel",
    "多机多卡": "several machines",
    "混合精度": "mixed precision",
    "环境变量": "variables",
    "日志": "log",
    "评估": "evaluation",
    "断点": "resume",
    "检查点": "checkpoint",
    "同步BN": "sync BN",
    "同步批归一化": "synchronised batch norm",
    "梯度累积": "gradient accumulation",
    "梯度压缩": "compression",
    "学习率": "rate",
    "预热": "warm-up",
    "随机种子": "seed",
    "显存": "memory",
    "慢节点": "slow",
    "离线安装": "offline",
    "镜像": "mirror",
    "驱动": "driver",
    "静态 IP": "static IP",
    "磁盘": "disk",
    "预训练": "pre-trained",
    "奇数": "odd number",
    "掩码": "mask",
    "全局批次": "joint batch",
    "分级": "hierarchical",
    "通信": "communicat",
    "弹性": "elastic",
    "防火墙": "firewall",
    "共享": "shared",
    "单机多卡": "all cards",
    "负载不均衡": "more load",
    "总进程数": "number of all processes",
    "自定义集群": "a cluster of your own",
    "集群环境": "backend and cluster",
    "主机": "the master",
    "均分": "equal part",
    "预处理": "preprocessing",
    "预读": "prefetch",
    "归一化": "normalise",
    "权限": "permission",
    "硬盘": "measures the disk",
    "阻塞": "waits in silence",
    "数据加速": "wait for their data",
    "反向传播": "backward",
    "跨卡": "two small exchanges",
    "目标检测": "detection",
    "语义分割": "segmentation",
    "半精度": "half precision",
    "推理": "inference",
    "准确率": "accuracy",
    "正确率": "correct samples",
    "进程间": "over processes",
    "利用率": "utilisation",
    "泛化": "generalizes",
    "权重文件": "files of weights",
    "损坏": "damaged file",
    "保存模型": "save",
    "模型重用": "resume",
    "单卡可以直接加载": "one card reads",
    "全连接": "fully connected",
    "不同的种子": "a seed of its own",
    "可复现": "reproduced",
    "局域网": "LAN",
    "代理": "proxy",
    "算力": "compute capability",
    "每次迭代": "iteration",
    "剩余时间": "time that is left",
    "线程池": "a pool",
    "慢 trainer": "slow trainer",
    "环形": "ring allreduce",
    "打乱": "shuffl",
    "统计量": "statistics",
}
"""Words of the articles' text, and how the English pages say it."""


@pytest.mark.parametrize(("language", "text"), [("English", ENGLISH), ("Chinese", CHINESE)])
def test_words_of_programs_and_commands_are_found(language: str, text: str) -> None:
    assert len(CODE) > 90
    assert [word for word in CODE if word not in text] == [], language


def test_words_of_the_articles_are_found() -> None:
    assert [word for word in WORDS if word not in CHINESE] == []
    assert [word for word in WORDS.values() if word.lower() not in ENGLISH.lower()] == []
