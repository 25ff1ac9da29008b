//! The loss of documents that share a row.
use candle_core::{DType, Device, Tensor};
use candle_ddp::data::pack;
use candle_nn::{VarBuilder, VarMap};
use pretrain::{Architecture, Config, Model, TokenBatch};

#[test]
fn a_row_has_the_losses_of_its_documents_by_themselves() {
    let documents: [&[u32]; 3] = [&[1, 2, 3, 4], &[5, 6], &[7, 8, 9]];
    for model in [Architecture::Gpt, Architecture::Llama] {
        let config = Config { model, vocabulary: 10, context: 9, width: 16, layers: 2, heads: 4, key_heads: Some(2) };
        let model = Model::new(config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu)).unwrap();
        let sum = |batch: TokenBatch| {
            let mean = model.loss(&batch).unwrap().to_scalar::<f32>().unwrap();
            (mean * batch.count() as f32, batch.count())
        };
        let (mut alone, mut count) = (0., 0);
        for document in documents {
            let tensor = |tokens: &[u32]| Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let (loss, tokens) =
                sum(TokenBatch::Windows(tensor(&document[..document.len() - 1]), tensor(&document[1..])));
            (alone, count) = (alone + loss, count + tokens);
        }
        let together = sum(TokenBatch::Row(pack(documents).unwrap()));
        assert_eq!((together.1, count), (6, 6));
        assert!((together.0 - alone).abs() < 1e-4, "{} instead of {alone}", together.0);
    }
}
