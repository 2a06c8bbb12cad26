"""The flags of peer_gpt.py and peer_llama.py, by the standard library alone: also read where there is no torch."""
import argparse


def parse(argv, description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="fsdp2", choices=["fsdp1", "fsdp2", "ddp", "none"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="of the host; 0: what torch takes")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=0, help="the norm that gradients are clipped to; 0: none")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, keep and reduce float32")
    parser.add_argument("--pure-bf16", action="store_true", help="parameters, gradients and states in bf16")
    parser.add_argument("--cpu-offload", action="store_true", help="CPUOffloadPolicy, of fsdp2 only")
    parser.add_argument("--recompute", action="store_true", help="of each block only the input is kept")
    parser.add_argument("--no-optim", action="store_true")
    parser.add_argument("--init", help="a folder of a model.safetensors with the initial parameters")
    parser.add_argument("--losses", action="store_true", help="print the loss of every step, too")
    args = parser.parse_args(argv)
    if args.cpu_offload and args.impl != "fsdp2":
        parser.error("--cpu-offload: only --impl=fsdp2 has a CPUOffloadPolicy")
    if args.bf16 and (args.pure_bf16 or args.impl in ("ddp", "none")):
        parser.error("--bf16: only fsdp1 and fsdp2 compute in bf16 over float32 shards, and not with --pure-bf16")
    return args


def parse_llama(argv, description):
    """Those that //examples/llama:train has, too, are called as there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with config.json, and maybe safetensors files")
    parser.add_argument("--impl", default="plain", choices=["plain", "fsdp2"])
    parser.add_argument("--data", help="NAME.bin of uint32")
    parser.add_argument("--metrics", help="where a line of JSON is appended for each step")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1, help="of the host; 0: what torch takes")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--recompute", action="store_true", help="of each layer only the input is kept")
    parser.add_argument("--compile", metavar="BACKEND", help="each layer, of fsdp2: inductor")
    parser.add_argument("--lora_rank", type=int, default=0, help="train PEFT's adapters on all linear layers")
    parser.add_argument("--lora_alpha", type=float, default=32)
    parser.add_argument("--max_tokens", type=int, default=0, help="do not train: continue --batch rows by so many tokens")
    parser.add_argument("--tokens", default="1,2,3", help="what each of these rows begins with")
    args = parser.parse_args(argv)
    if not args.max_tokens and not (args.data and args.metrics):
        parser.error("--data and --metrics are needed to train")
    if args.impl == "fsdp2" and args.lora_rank or args.impl == "plain" and args.compile:
        parser.error("--lora_rank is for --impl=plain, --compile for --impl=fsdp2")
    return args
