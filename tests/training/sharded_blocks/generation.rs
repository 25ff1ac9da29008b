//! Ranks whose texts end after different numbers of tokens.
use super::*;
use candle_core::{D, IndexOp};
use candle_ddp::ReduceOp;
use candle_ddp::nn::embedding;
use candle_nn::{Func, func};

const TOKENS: usize = 11;

fn words(vb: VarBuilder) -> Result<Func<'static>> {
    let embedding = embedding(TOKENS, WIDTH, vb.pp("embedding"))?;
    let layer = block(vb.pp("layer"), Layer::new)?;
    let head = linear(WIDTH, TOKENS, vb.pp("head"))?;
    // A token depends on all before it.
    Ok(func(move |x| head.forward(&layer.forward(&embedding.forward(x)?.cumsum(1)?)?)))
}

/// The recipe of docs/data.md.
fn generate(
    model: &DistributedDataParallel<impl Module>,
    mut text: Tensor,
    end: u32,
    at_most: usize,
) -> candle_ddp::Result<Tensor> {
    let (group, mut is_done) = (model.process_group(), false);
    for _ in 0..at_most {
        let logits = no_grad(|| model.forward(&text))?;
        let next = logits.i((.., logits.dim(1)? - 1))?.argmax_keepdim(D::Minus1)?;
        if !is_done {
            text = Tensor::cat(&[&text, &next], 1)?;
            is_done = next.i((0, 0))?.to_scalar::<u32>()? == end;
        }
        let [remaining] = group.all_reduce_scalars([f64::from(!is_done)], ReduceOp::Sum)?;
        if remaining == 0. {
            break;
        }
    }
    Ok(text)
}

fn texts(world_size: usize, prompts: &[u32], sharding: Sharding, end: u32) -> Vec<Vec<u32>> {
    let texts = ranks(world_size, |pg| {
        let options = DdpOptions { sharding, init_seed: Some(3), ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), words, options)?;
        let own = prompts.iter().skip(pg.rank()).step_by(world_size);
        let text = |prompt: &u32| {
            let text = Tensor::from_slice(&[*prompt], (1, 1), pg.device())?;
            Ok(generate(&ddp, text, end, 9)?.flatten_all()?.to_vec1()?)
        };
        own.map(text).collect::<candle_ddp::Result<Vec<Vec<u32>>>>()
    });
    texts.into_iter().flatten().collect()
}

#[test]
fn ranks_generate_until_the_last_text_has_ended() {
    let prompts = [0, 4, 7];
    let endless = texts(1, &prompts, Sharding::Off, u32::MAX);
    // The first text ends early.
    let end = endless[0][2];
    let expected = texts(1, &prompts, Sharding::Off, end);
    assert!(expected.iter().any(|text| text.len() != expected[0].len()), "{expected:?}");
    let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: None };
    assert_eq!(texts(3, &prompts, sharding, end), expected);
}
