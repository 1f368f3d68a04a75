"""What random programs are made of, as source."""

# What a statement is: {x} and {y} are earlier values of shape (4, 3), {v} is the new one.
PURE = {
    "sin": "{v} = {x}.sin()",
    "tanh": "{v} = {x}.tanh()",
    "sigmoid": "{v} = {x}.sigmoid()",
    "relu": "{v} = {x}.relu()",
    "add": "{v} = {x} + {y}",
    "sub": "{v} = {x} - {y} * 0.5",
    "mul": "{v} = {x} * {y}",
    "weight": "{v} = {x} * w0",
    "bias": "{v} = {x} + w1",
    "matmul": "{v} = ({x} @ w2).tanh()",
    "linear": "{v} = F.linear({x}, w2, w1).sigmoid()",
    "buffer": "{v} = {x} * (b0 + 1)",
    "member": "{v} = {x} * d0['a'] + d0['b'][0]",
    "cat": "{v} = torch.cat([{x}[:2], {y}[2:]])",
    "where": "{v} = torch.where({x} > 0, {x}, {y})",
    "norm": "{v} = F.layer_norm({x}, (3,), w1)",
    "softmax": "{v} = {x}.softmax(1)",
    "view": "{v} = {x}.t()[:, [1, 0, 3, 2]].t()",
    "reshape": "{v} = {x}.reshape(2, 6).view(4, 3)",
    "expand": "{v} = {x}[:1].expand(4, 3) * {y}",
    "alias": "{v} = {x}[:]",
    "same": "{v} = {x}",
    "temporary": "{v} = ({x} * 1).mul_({y})",
    "part": "{v} = {x} * 1\n{v}[1:].mul_({y}[:3])",
    "ones": "{v} = {x} * torch.ones(3)",
    "detach": "{v} = {x}.sin() * {y}.detach()",
    "no_grad": "with torch.no_grad():\n    {v} = {x} * 2\n{v} = {v} * {y}",
    "autocast": (
        "with torch.autocast('cpu', torch.bfloat16):\n    {v} = ({x} @ w2).to({x}.dtype).sin()"
    ),
    "offload": "with torch.autograd.graph.save_on_cpu():\n    {v} = {x}.sin() * {y}",
    "hook": "{v} = {x} * 1\n{v}.requires_grad and {v}.register_hook(twice)",
    "custom": "{v} = Cube.apply({x})",
    "module": "{v} = m{k}({x})",
    "call": "{v} = torch.func.functional_call(m0, {{'0.bias': w1}}, ({x},))",
}
RANDOM = {
    "dropout": "{v} = F.dropout({x}, 0.4)",
    "rand": "{v} = {x} * torch.rand(4, 3, dtype={x}.dtype)",
    "rrelu": "{v} = F.rrelu({x}, training=True)",
    "bernoulli": "{v} = {x} * torch.bernoulli(torch.full((4, 3), 0.5, dtype={x}.dtype))",
    "fork": "with torch.random.fork_rng(devices=[]):\n    {v} = F.dropout({x}, 0.4)",
    "reseed": "torch.manual_seed(7)\n{v} = F.dropout({x}, 0.4)",
}
# What breaks the rules that a function does the same each time and leaves its inputs alone: a
# program with one of these may be refused.
ROUGH = {
    "inplace": "{x}.mul_(1.5)\n{v} = {x}",
    "inplace_view": "{x}[1:].add_({y}[:3])\n{v} = {x} * 1",
    "stop": "{v} = {x} * w0.detach() * 2",
    "inner_grad": (
        "{v} = {x} + 0 * w0\n"
        "{v} = torch.autograd.grad({v}.sin().sum(), {v}, create_graph=True)[0] * {v}"
    ),
    "boom": "if ms.is_recomputing():\n    raise Boom('in the recompute')\n{v} = {x} * 1",
    "differs": "{v} = torch.cat([{x}] * (2 if ms.is_recomputing() else 1)).sin()[:4]",
}
# As often as they are named.
REGIONS = (
    10 * ["checkpoint"] + 5 * ["explicit"] + 3 * ["torch", "reentrant", "sequential", "modules"]
    + 2 * ["raises"] + ["patched"]
)  # fmt: skip
SHARED = "w0, w1, w2, d0['b'][0], m0, m1"
OPTIONS = ["", "", "", "", "", "early_stop=False", "debug=True", "use_reentrant=True",
           "context_fn=ms.count_once_contexts", "offload='cpu'",
           "preserve_rng_state=True"]  # fmt: skip
MODULES = {
    "linear": "nn.Sequential(nn.Linear(3, 3), nn.Tanh())",
    "batch_norm": "nn.Sequential(nn.Linear(3, 3), ms.BatchNorm1d(3), nn.Sigmoid())",
    "torch_batch_norm": "nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())",
    "cumulative": "nn.Sequential(ms.BatchNorm1d(3, momentum=None), nn.Tanh())",
    "dropout_module": (
        "nn.Sequential(ms.BatchNorm1d(3, activation='relu'), nn.Linear(3, 3), nn.Dropout(0.3))"
    ),
}
# Between forward and backward. Those of CHANGES change what a recompute may read.
CHANGES = {
    "leaf": "with torch.no_grad():\n    x{k}.mul_(3)",
    "weight": "with torch.no_grad():\n    w{k}.add_(1)",
    "buffer": "b0.mul_(10)",
    "member": "d0['a'].mul_(5)",
    "of_list": "d0['b'][0].detach().add_(1)",
    "replaced_member": "d0['a'] = torch.full((4, 3), 3.0, dtype=DTYPE)",
    "value": "with torch.no_grad():\n    {x}.mul_(2)",
    "rebound": "{x} = {x}.detach() * 3",
    "module_weight": "with torch.no_grad():\n    m{m}[0].weight.mul_(2)",
    "replaced_weight": "m{m}[0].weight = P(torch.full_like(m{m}[0].weight, 0.5))",
    "weight_data": "w{k}.data = torch.full_like(w{k}, 0.25)",
    "frozen": "w{k}.requires_grad_(False)",
    "eval": "m{m}.eval()",
    "train": "m{m}.eval()\nm{m}.train()",
    "default_dtype": "torch.set_default_dtype(torch.float16)",
    "statistics": "for b in m{m}.buffers():\n    b.mul_(2)",
}
HARMLESS = {
    "draw": "torch.rand(5)",
    "seed": "torch.manual_seed(11)",
    "detached": "{x}.detach().clone().mul_(3)",
    "forward": "with torch.no_grad():\n    m{m}(x1)",
}
BACKWARDS = {
    "backward": "loss.backward()",
    "retained": "loss.backward(retain_graph=True)",
    "inputs": "loss.backward(inputs=[x0, w0], retain_graph=True)",
    "grad": (
        "out = torch.autograd.grad(loss, [x0, w0, w1, w2], allow_unused=True, retain_graph=True)"
    ),
    "partial": "{x}.requires_grad and {x}.sum().backward(retain_graph=True)",
    "double": (
        "out = torch.autograd.grad(loss, [x0, w0], create_graph=True, allow_unused=True)\n"
        "again = [g for g in out if g is not None and g.requires_grad]\n"
        "again and sum(g.square().sum() for g in again).backward(retain_graph=True)"
    ),
    "thread": "in_thread(lambda: loss.backward(retain_graph=True))",
    "autocast": "with torch.autocast('cpu', torch.bfloat16):\n    loss.backward(retain_graph=True)",
    "no_grad": "with torch.no_grad():\n    loss.backward(retain_graph=True)",
}  # fmt: skip
VIEWS = ("alias", "same", "reshape", "inplace", "inplace_view")
TABLES = {**PURE, **RANDOM, **ROUGH}
LEAVES = """\
x0, x1 = leaf(0, 4, 3).requires_grad_(), leaf(1, 4, 3)
w0, w1, w2 = P(leaf(2, 4, 3)), P(leaf(3, 3)), P(leaf(4, 3, 3))
b0, d0 = leaf(5, 4, 3), {'a': leaf(6, 4, 3), 'b': [leaf(7, 4, 3).requires_grad_()]}"""
STATE = """\
yield 'values', [x0, x1, w0, w1, w2, b0, d0['a'], d0['b'][0], *parameters(m0, m1)]
yield 'statistics', statistics(m0, m1)
yield 'torch_statistics', torch_statistics(m0, m1)"""
