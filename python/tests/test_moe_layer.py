# SPDX-License-Identifier: MIT
"""MoELayer in the place of transformers' blocks: values and gradients against the block in float64, and how torch uses a module."""
import copy
import threading

import pytest
import torch

import fp8flow

transformers = pytest.importorskip("transformers", minversion="5")
H, F, E, K, T = 128, 256, 8, 2, 96


def qwen3(normalised=True):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    return Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K,
                                                              norm_topk_prob=normalised))


def olmoe():
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    return OlmoeSparseMoeBlock(transformers.OlmoeConfig(hidden_size=H, intermediate_size=F, num_experts=E, num_experts_per_tok=K))


def mixtral(**options):
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    return MixtralSparseMoeBlock(transformers.MixtralConfig(hidden_size=H, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K,
                                                            **options))


FAMILIES = {"qwen3_moe": qwen3, "qwen3_moe_not_normalised": lambda: qwen3(False), "olmoe": olmoe, "mixtral": mixtral}


def filled(block, device, dtype=torch.float32):
    """The block with random weights that bfloat16 holds exactly."""
    for parameter in block.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.05).to(torch.bfloat16).to(device, dtype)
    return block


def rows(device, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(torch.bfloat16).to(device, dtype)


def run(block, x, dy):
    """Output and gradients by name, float64 on the CPU."""
    x = x.detach().clone().requires_grad_()
    block.zero_grad()
    y = block(x)
    y.backward(dy.to(y.dtype))
    named = {"y": y, "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}
    return {name: value.detach().double().cpu() for name, value in named.items()}


def errors(got, wanted):
    assert got.keys() == wanted.keys()
    return {name: float((got[name] - wanted[name]).norm() / wanted[name].norm()) for name in got}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_the_block(device, family, dtype):
    """As near to float64 as the block itself in bfloat16, which rounds more often; tokens that it sends elsewhere count against it."""
    block = filled(FAMILIES[family](), device)
    x, dy = rows(device, 2, T // 2, H), rows(device, 2, T // 2, H)
    exact = run(copy.deepcopy(block).double(), x.double(), dy)
    floor = errors(run(copy.deepcopy(block).bfloat16(), x, dy), exact)
    layer = fp8flow.MoELayer.from_hf(block.to(dtype), recipe="bf16")
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in block.named_parameters()]
    found = errors(run(layer, x, dy), exact)
    for name, error in found.items():
        assert error < max(1.2 * floor[name], 0.004), (name, found, floor)


@pytest.mark.parametrize("recipe,bound", [("fp8_flow", 0.08), ("fp8_blockwise", 0.08), ("fp8_tensorwise", 0.1), ("fp8_rowwise", 0.08),
                                          ("mxfp8", 0.08)])
def test_recipes(device, recipe, bound):
    block = filled(qwen3(), device)
    x, dy = rows(device, T, H), rows(device, T, H)
    exact = run(copy.deepcopy(block).double(), x[None].double(), dy[None])
    found = run(fp8flow.MoELayer.from_hf(block, recipe=recipe), x, dy)
    found["x"], found["y"] = found["x"][None], found["y"][None]
    for name, error in errors(found, exact).items():
        assert 0.001 < error < bound, (name, error)


def small(device, topk=K, **options):
    torch.manual_seed(2)
    return fp8flow.MoELayer(H, F, E, topk, recipe="bf16", device=device, dtype=torch.float32, **options)


def test_finite_differences(device):
    """The gradients are those of the output; with every expert chosen, so that no step changes the choice."""
    layer = small(device, topk=E)
    x = rows(device, T, H, dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    dy = rows(device, T, H)

    def loss():
        with torch.no_grad():
            return float((layer(x).double() * dy.double()).sum())

    run(layer, x, dy)
    for name, parameter in layer.named_parameters():
        step = parameter.grad * (0.1 * weights[name].norm() / parameter.grad.norm())
        differences = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(weights[name] + sign * step)
            differences.append(loss())
        with torch.no_grad():
            parameter.copy_(weights[name])
        predicted = 2 * float((step.double() * parameter.grad.double()).sum())
        assert differences[0] - differences[1] == pytest.approx(predicted, rel=0.1), name


def test_gradients_add_up(device):
    layer = small(device)
    x, dy = rows(device, 2, T, H), rows(device, 2, T, H)
    apart = [run(layer, x[i], dy[i]) for i in range(2)]
    layer.zero_grad()
    for i in range(2):
        layer(x[i]).backward(dy[i])
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.double().cpu(), apart[0][name] + apart[1][name])


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW fused", "AdamW foreach", "loaded", "data"])
def test_sees_new_weights(device, optimizer):
    layer = small(device)
    x, dy = rows(device, T, H), rows(device, T, H)
    before = run(layer, x, dy)
    if optimizer == "loaded":
        layer.load_state_dict({name: value * 2 for name, value in layer.state_dict().items()})
    elif optimizer == "data":
        layer.experts.down_proj.data.mul_(2)
        layer.weights_changed()
    else:
        name, *options = optimizer.split()
        getattr(torch.optim, name)(layer.parameters(), lr=0.1, **{option: True for option in options}).step()
    fresh = small(device)
    fresh.load_state_dict(layer.state_dict())
    after = run(layer, x, dy)
    assert not torch.equal(before["y"], after["y"])
    assert torch.equal(after["y"], run(fresh, x, dy)["y"])


def test_sees_weights_that_are_computed(device):
    class Times(torch.nn.Module):
        factor = 1

        def forward(self, w):
            return w * self.factor

    layer, times, x = small(device), Times(), rows(device, T, H)
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "down_proj", times)
    with torch.no_grad():
        once = layer(x)
        times.factor = 2  # the product may lie where the one before lay
        assert torch.equal(layer(x), once * 2)
    with torch.inference_mode():
        assert torch.isfinite(small(device)(x)).all()  # parameters without version counters


def test_grows_and_shrinks(device):
    layer = small(device, max_tokens=16)
    x = rows(device, T, H)
    whole = layer(x)
    for tokens in (8, 0, 64, 1):
        assert torch.equal(layer(x[:tokens]), whole[:tokens])
    y = layer(x[:8])
    y.sum().backward()
    assert layer.gate.weight.grad is not None


def test_backward_belongs_to_the_last_forward(device):
    layer = small(device)
    x = rows(device, T, H).requires_grad_()
    first = layer(x)
    layer(x)
    with pytest.raises(RuntimeError, match="another one of this MoELayer has followed"):
        first.sum().backward()
    y = layer(x)
    y.sum().backward(retain_graph=True)
    with pytest.raises(fp8flow.Error, match="without a forward"):
        y.sum().backward()


def test_two_threads(device, monkeypatch):
    layer, x = small(device), rows(device, T, H)
    second = threading.Thread(target=layer, args=(x[:8],))

    def call_slowly(function, *arguments, call=fp8flow.moe_layer.call):
        call(function, *arguments)
        if function == "layer_forward" and threading.current_thread() != second:
            second.start()
            second.join(1)

    monkeypatch.setattr(fp8flow.moe_layer, "call", call_slowly)
    first = layer(x)
    second.join()
    with pytest.raises(RuntimeError, match="another one of this MoELayer has followed"):
        first.sum().backward()


def test_checkpointing(device):
    layer = small(device)
    x, dy = rows(device, T, H), rows(device, T, H)
    plain = run(layer, x, dy)
    wrapped = torch.nn.Sequential(layer)
    x = x.requires_grad_()
    layer.zero_grad()
    torch.utils.checkpoint.checkpoint(wrapped, x, use_reentrant=False).backward(dy)
    assert torch.equal(x.grad.double().cpu(), plain["x"])


def test_copies_and_no_grad(device):
    layer = small(device)
    x = rows(device, T, H, dtype=torch.float32)
    y = layer(x)
    assert y.dtype == torch.float32 and y.requires_grad
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        assert torch.equal(twin(x), y) and not twin(x).requires_grad
        layer.gate.weight.zero_()
        assert torch.equal(twin(x), y) and not torch.equal(layer(x), y)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe", "Mixtral"])
def test_router_logits_for_the_balancing_loss(device, family):
    sizes = dict(vocab_size=64, hidden_size=H, intermediate_size=F, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                 num_experts_per_tok=K, router_aux_loss_coef=1.0)
    experts = dict(num_local_experts=E) if family == "Mixtral" else dict(num_experts=E)
    if family == "Qwen3Moe":
        experts.update(moe_intermediate_size=F, head_dim=64)
    config = getattr(transformers, family + "Config")(**sizes, **experts)
    tokens = torch.arange(16, device=device).reshape(2, 8)
    # A token whose K-th and next logits are as close as bfloat16's rounding may go to either expert, and moves the gradient by 5 to 15 %.
    for seed in range(100):
        torch.manual_seed(seed)
        model = getattr(transformers, family + "ForCausalLM")(config).to(device, torch.bfloat16)
        sorted_logits = [a.detach().float().sort(-1, descending=True).values for a in model(tokens, output_router_logits=True).router_logits]
        if all(float((a[:, K - 1] - a[:, K]).min() / a.abs().max()) > 0.02 for a in sorted_logits):
            break
    else:
        pytest.fail("every model has a token between two experts")
    ours = copy.deepcopy(model)
    for layer in ours.model.layers:
        layer.mlp = fp8flow.MoELayer.from_hf(layer.mlp, recipe="bf16")

    def loss_of(causal, **options):
        causal.zero_grad()
        out = causal(input_ids=tokens, labels=tokens, **options)
        out.loss.backward()
        return out

    assert loss_of(ours).router_logits is None
    for options in ({"output_router_logits": True}, {}):  # asked for in the call, then by the configuration that was set afterwards
        model.config.output_router_logits = ours.config.output_router_logits = not options
        wanted, got = loss_of(model, **options), loss_of(ours, **options)
        assert len(got.router_logits) == 2
        for a, b in zip(got.router_logits, wanted.router_logits):
            assert torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02)
        aux = [float(out.aux_loss.detach()) for out in (got, wanted)]
        assert abs(aux[0] - aux[1]) < 0.02 and aux[0] > 1
        for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"):
            a, b = (m.get_parameter(name).grad.float() for m in (ours, model))
            assert float((a - b).norm() / b.norm()) < 0.01, name


def test_refuses(device):
    def refused(text, function, *arguments, **options):
        with pytest.raises(ValueError) as caught:
            function(*arguments, **options)
        assert text in str(caught.value), str(caught.value)

    layer = small(device)
    refused("x is torch.float32 [4, 64]", layer, torch.ones(4, 64, device=device))
    refused("x is torch.int64", layer, torch.ones(4, H, device=device, dtype=torch.int64))
    refused("recipe is 'fp4', want bf16, ", fp8flow.MoELayer, H, F, E, K, recipe="fp4")
    refused("want one device, and float32 or bfloat16", layer.half(), rows(device, 4, H))
    refused("block is a Linear, want Qwen3MoeSparseMoeBlock", fp8flow.MoELayer.from_hf, torch.nn.Linear(4, 4))
    refused("router_jitter_noise is 0.1, want 0", fp8flow.MoELayer.from_hf, mixtral(router_jitter_noise=0.1))
    refused("use GELUActivation, want SiLU", fp8flow.MoELayer.from_hf, mixtral(hidden_act="gelu"))
    odd = fp8flow.MoELayer(100, F, E, K, device=device)
    with pytest.raises(fp8flow.Error, match="hidden_size is 100, want a multiple of 128") as caught:
        odd(rows(device, 4, 100))
    assert caught.value.status == 2
    many = fp8flow.MoELayer(H, F, E, E + 1, device=device)
    with pytest.raises(fp8flow.Error, match="moe_router_topk is 9, want 1 to moe.num_experts"):
        many(rows(device, 4, H))
