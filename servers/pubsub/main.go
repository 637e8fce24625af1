// A Pub/Sub server on loopback: Google's own fake of it. Prints its port in one line, once it listens.
// Ends with its starter.
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	pb "cloud.google.com/go/pubsub/v2/apiv1/pubsubpb"
	"cloud.google.com/go/pubsub/v2/pstest"
	"google.golang.org/grpc"
)

// Time that an empty pull waits for a message. pstest waits for half a second, whatever arrives meanwhile.
const pullWait = 100 * time.Millisecond

func pullSoon(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	pull, ok := request.(*pb.PullRequest)
	if !ok || pull.ReturnImmediately {
		return handle(ctx, request)
	}
	pull.ReturnImmediately = true
	for end := time.Now().Add(pullWait); ; time.Sleep(10 * time.Millisecond) {
		reply, err := handle(ctx, request)
		if err != nil || len(reply.(*pb.PullResponse).ReceivedMessages) > 0 || time.Now().After(end) || ctx.Err() != nil {
			return reply, err
		}
	}
}

func main() {
	fake := pstest.NewServerWithAddress("127.0.0.1:0")
	defer fake.Close()
	// Listens by itself, too: what pstest listens with refuses requests beyond 4 MB, and Pub/Sub takes 10.
	server := grpc.NewServer(grpc.MaxRecvMsgSize(16<<20), grpc.UnaryInterceptor(pullSoon))
	pb.RegisterPublisherServer(server, &fake.GServer)
	pb.RegisterSubscriberServer(server, &fake.GServer)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go server.Serve(listener)
	defer server.Stop()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	io.Copy(io.Discard, os.Stdin) // a pipe from the starter
}
